#pragma once

#include <map>
#include <string>
#include <vector>

#include <fsdp/held.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/file.h"

namespace fsdp::disk {

/// Reads elements of the tensors of a checkpoint: those blocks in which wanted ones lie, each of which is checked.
/// Of a piece without checksums, the wanted elements alone.
/// Errors name the file and the tensor.
class PieceReader {
 public:
  PieceReader(std::string folder, const CheckpointIndex& index, File::Links links = File::Links::kRefuse);

  /// What `here` has, from the file: in its dtype, on the CPU.
  HeldTensor read(const std::string& name, const HeldTensor& here);
  /// The same in the dtype that was saved.
  HeldTensor read_as_saved(const std::string& name, const HeldTensor& here);
  at::Tensor read_whole(const std::string& name);

 private:
  struct Named {
    const std::string& name;
    const IndexedTensor& tensor;
  };

  HeldTensor read_piece(const std::string& name, const HeldTensor& here);
  // Where the saved tensor lies in memory in another order.
  HeldTensor in_order_of(const HeldTensor& here, const std::string& name);
  void check_covered(const Named& named, const Extent& want) const;
  void read_elements(const Named& named, const Extent& want, char* to);
  void read_checked(const Named& named, const StoredPiece& piece, const OverlapRun& run, char* to);
  void read_run(const Named& named, const StoredPiece& piece, const OverlapRun& run, char* to);
  const char* block(const Named& named, const StoredPiece& piece, int64_t number);
  void read_block(const Named& named, const StoredPiece& piece, int64_t number, char* to);
  const File& file_of(const Named& named, const StoredPiece& piece);

  std::string folder_;
  const CheckpointIndex& index_;
  File::Links links_;
  std::map<std::string, File> files_{};
  std::vector<char> block_{}; // one that is only partly wanted
  const StoredPiece* piece_of_block_ = nullptr;
  int64_t number_of_block_ = 0;
};

} // namespace fsdp::disk
