#include "checkpoint/safetensors_file.h"

#include <utility>

#include "base/check.h"

namespace fsdp::disk {

namespace {

constexpr int64_t kLongestHeader = 100'000'000; // as other readers have it

int64_t header_bytes(const File& file) {
  FSDP_CHECK(
      file.size() >= kSafetensorsLengthBytes,
      "[safetensors] {} has {} bytes, which is too short for a safetensors file",
      file.path(),
      file.size());
  uint64_t bytes = 0;
  file.read(0, &bytes, kSafetensorsLengthBytes);
  FSDP_CHECK(
      bytes <= static_cast<uint64_t>(file.size() - kSafetensorsLengthBytes) && bytes <= kLongestHeader,
      "[safetensors] {} has {} bytes, and would have a header of {}: it is cut short, damaged, or no safetensors file",
      file.path(),
      file.size(),
      bytes);
  return static_cast<int64_t>(bytes);
}

SafetensorsHeader read_header(const File& file, int64_t bytes) {
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read(kSafetensorsLengthBytes, text.data(), bytes);
  return parse_safetensors_header(text, file.size() - kSafetensorsLengthBytes - bytes, file.path());
}

} // namespace

SafetensorsFile::SafetensorsFile(const std::string& path, File::Links links) : file_(File::open(path, links)) {
  const int64_t bytes = header_bytes(file_);
  data_ = kSafetensorsLengthBytes + bytes;
  header_ = read_header(file_, bytes);
  for (size_t i = 0; i < header_.tensors.size(); ++i) {
    by_name_[header_.tensors[i].name] = i;
  }
}

const StoredTensor& SafetensorsFile::tensor(const std::string& name) const {
  const auto found = by_name_.find(name);
  FSDP_CHECK(
      found != by_name_.end(),
      "[safetensors] {} has no tensor '{}': see whether it is another model's",
      file_.path(),
      shown(name));
  return header_.tensors[found->second];
}

void SafetensorsFile::read(const StoredTensor& tensor, int64_t offset, void* to, int64_t bytes) const {
  TORCH_INTERNAL_ASSERT(offset >= 0 && bytes >= 0 && offset <= tensor.bytes() - bytes);
  file_.read(data_ + tensor.begin + offset, to, bytes);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, SafetensorsHeader header)
    : header_(std::move(header)),
      text_(lay_out_safetensors(header_, path)),
      data_(kSafetensorsLengthBytes + static_cast<int64_t>(text_.size())),
      file_(File::create(path)) {
  const uint64_t bytes = text_.size();
  file_.write(&bytes, kSafetensorsLengthBytes);
  file_.write(text_.data(), static_cast<int64_t>(bytes));
}

void SafetensorsWriter::write(const void* from, int64_t bytes) {
  file_.write(from, bytes);
}

void SafetensorsWriter::finish() {
  const int64_t end = header_.tensors.empty() ? 0 : header_.tensors.back().end;
  TORCH_INTERNAL_ASSERT(file_.size() == data_ + end);
  file_.flush();
}

} // namespace fsdp::disk
