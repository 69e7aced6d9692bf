#include "checkpoint/export_parts.h"

#include <cstring>
#include <map>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/covers.h"

namespace fsdp::disk {

namespace {

using Extents = std::vector<Extent>;

static_assert(std::is_trivially_copyable_v<ExportPart>);

std::vector<ExportPart> from_bytes(const std::string& bytes) {
  std::vector<ExportPart> parts(bytes.size() / sizeof(ExportPart));
  if (!parts.empty()) {
    std::memcpy(static_cast<void*>(parts.data()), bytes.data(), parts.size() * sizeof(ExportPart));
  }
  return parts;
}

IndexedTensor indexed(const StoredTensor& tensor, const Extents& extents) {
  IndexedTensor whole{.dtype = tensor.dtype, .sizes = tensor.sizes};
  for (const auto& extent : extents) {
    whole.pieces.push_back({.extent = extent});
  }
  return whole;
}

} // namespace

std::string to_bytes(const std::vector<ExportPart>& parts) {
  const auto* bytes = reinterpret_cast<const char*>(parts.data());
  return parts.empty() ? "" : std::string(bytes, parts.size() * sizeof(ExportPart));
}

void check_complete(const std::vector<ExportFile>& files, const std::vector<std::string>& parts_of_ranks) {
  std::map<std::pair<size_t, size_t>, Extents> written;
  for (const auto& bytes : parts_of_ranks) {
    for (const auto& part : from_bytes(bytes)) {
      written[{part.file, part.tensor}].push_back(part.extent);
    }
  }
  for (size_t file = 0; file < files.size(); ++file) {
    const auto& tensors = files[file].header.tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const IndexedTensor tensor = indexed(tensors[i], written[{file, i}]);
      FSDP_CHECK(
          covers(tensor, Extent::one_run(0, tensor.numel())),
          "[export_safetensors] these ranks have not all elements of '{}', or some of them twice: export on all ranks "
          "of its mesh, or on those of one replica",
          tensors[i].name);
    }
  }
}

} // namespace fsdp::disk
