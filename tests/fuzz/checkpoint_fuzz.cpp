// What reads checkpoints and safetensors files, given bytes of whoever wrote them: an Error, or what is right. No
// crash, and no memory for what is not there. Built and run by scripts/fuzz.sh.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include <fsdp/error.h>
#include <unistd.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/piece_reader.h"
#include "checkpoint/safetensors_file.h"

namespace fsdp::disk {
namespace {

constexpr int64_t kFileBytes = 4096; // of the file in which an index may say that tensors lie

/// A folder with such a file.
std::string make_folder() {
  std::string folder = "/tmp/fsdp-fuzz-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) {
    std::abort();
  }
  write_text(folder + "/rank-00000.safetensors", std::string(kFileBytes, '\0'));
  return folder;
}

const std::string& folder() {
  static const std::string folder = make_folder();
  return folder;
}

void check(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "expected %s\n", what);
    std::abort();
  }
}

void read_index(std::string_view json) {
  const auto index = parse_index(with_checksum("{" + std::string(json)), "index");
  PieceReader reader(folder(), index);
  for (const auto& [name, tensor] : index.tensors) {
    try {
      const at::Tensor whole = reader.read_whole(name);
      check(static_cast<int64_t>(whole.nbytes()) <= kFileBytes, "no more bytes than the file has");
    } catch (const Error&) { // of this tensor
    }
  }
  check(to_text(parse_index(to_text(index), "index")) == to_text(index), "the same index again");
}

void read_header(std::string_view text) {
  auto header = parse_safetensors_header(text, kFileBytes, "file");
  int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    check(tensor.begin >= end && tensor.end >= tensor.begin, "tensors side by side");
    end = tensor.end;
  }
  check(end == kFileBytes, "all bytes of the file to be a tensor's");
  const std::string again = lay_out_safetensors(header, "file");
  check(parse_safetensors_header(again, kFileBytes, "file").tensors.size() == header.tensors.size(), "the same again");
}

void read_file(std::string_view bytes) {
  const std::string path = folder() + "/file.safetensors";
  ::unlink(path.c_str());
  write_text(path, std::string(bytes));
  const SafetensorsFile file(path);
  for (const auto& tensor : file.header().tensors) {
    std::string values(static_cast<size_t>(tensor.bytes()), '\0');
    file.read(tensor, 0, values.data(), tensor.bytes());
  }
}

} // namespace
} // namespace fsdp::disk

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { // NOLINT: libFuzzer's name
  if (size == 0) {
    return -1;
  }
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (*data == '{') {
      fsdp::disk::read_index(rest);
    } else if (*data == 'h') {
      fsdp::disk::read_header(rest);
    } else {
      fsdp::disk::read_file(rest);
    }
  } catch (const fsdp::Error&) { // is refused
  }
  return 0;
}
