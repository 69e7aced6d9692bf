#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace fsdp::disk {

constexpr int64_t kSafetensorsLengthBytes = 8; // of the number before the header

/// A tensor in a safetensors file, whose elements lie there row by row.
struct StoredTensor {
  std::string name{};
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes{};
  int64_t begin = 0; ///< of its bytes, counted from the header's end
  int64_t end = 0;

  int64_t bytes() const {
    return end - begin;
  }
};

/// What the header of a safetensors file says: JSON, which is read from whoever wrote it.
struct SafetensorsHeader {
  std::vector<StoredTensor> tensors{}; ///< in the order of their bytes
  std::map<std::string, std::string> metadata{};
};

/// Of a file in which `data_bytes` follow the header. An Error, which names the file and the tensor, unless sizes,
/// dtypes and bytes agree, and the tensors lie one behind another, without gaps, up to the file's end.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes, const std::string& path);

/// Gives the tensors their places, those of long elements first, so that all are aligned, and returns the text. An
/// Error if a tensor cannot be in such a file.
std::string lay_out_safetensors(SafetensorsHeader& header, const std::string& path);

/// A name of whatever length and letters, as an error shows it.
std::string shown(std::string_view name);

} // namespace fsdp::disk
