#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>

#include <fsdp/extent.h>

/// What the index of a checkpoint says: which bytes of which tensor are where.
namespace fsdp::disk {

/// Elements of a tensor, in the order of its memory.
struct StoredPiece {
  std::string file{}; ///< beside the index
  int64_t offset = 0; ///< of the first byte in the file
  Extent extent{};
  std::vector<uint32_t> checksums{}; ///< CRC-32C of each block of its bytes

  bool operator==(const StoredPiece&) const = default;
};

struct IndexedTensor {
  c10::ScalarType dtype{};
  std::vector<int64_t> sizes{}, strides{}; ///< of the whole, whose memory has no gaps
  std::vector<StoredPiece> pieces{};

  int64_t numel() const;
};

using NamedValues = std::map<std::string, c10::IValue>;

/// An optimizer's numbers; its tensors lie beside the model's.
struct OptimizerNumbers {
  struct Group {
    std::vector<std::string> params{};
    NamedValues options{};
  };
  std::map<std::string, NamedValues> of_params{};
  std::vector<Group> groups{};
};

struct CheckpointIndex {
  int64_t step = 0;
  int64_t block_bytes = 1; ///< that have one checksum
  std::map<std::string, IndexedTensor> tensors{}; ///< "model/NAME", "optimizer/NAME/KEY", "extra/NAME", "random/RANK"
  std::optional<OptimizerNumbers> optimizer{};
  NamedValues extra{};
};

std::string to_text(const CheckpointIndex& index);
/// An index as JSON, with its checksum as the first field.
std::string with_checksum(const std::string& json);
/// The same JSON again. An Error, which names the file, if the checksum is another's, or there is none.
std::string without_checksum(const std::string& text, const std::string& path);
/// Of whoever wrote it: all numbers are within what they belong to, all file names lie beside the index. An Error,
/// which names the file and the tensor, if not.
CheckpointIndex parse_index(const std::string& text, const std::string& path);

constexpr int64_t kLongestIndex = int64_t{1} << 30; ///< in bytes

/// Adds to what one rank has written what another has. An Error if they have saved different models, or with different
/// options.
void add_part(CheckpointIndex& index, const CheckpointIndex& part);
/// An Error if elements of a tensor are nowhere, or in two places.
void check_complete(const CheckpointIndex& index);

} // namespace fsdp::disk
