#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <fsdp/group.h>

namespace fsdp::adapter {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// The collectives of a c10d process group under one name each for all versions of LibTorch, with other collectives in
/// place of those that a backend lacks, and any number of elements, although some backends (MPI) count them in 32 bits.
/// Throws what c10d throws. Not thread safe.
class Collectives {
 public:
  Collectives(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::chrono::milliseconds timeout);
  ~Collectives();

  /// `output` holds every rank's `input`, one after another.
  Works all_gather(at::Tensor output, at::Tensor input);
  /// Several all-gathers, as one operation where the backend can.
  Works all_gather_each(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  /// `input` has one row per rank; `output` becomes the sum of this rank's rows.
  Works reduce_scatter(at::Tensor output, at::Tensor input);
  /// Row r of `output` becomes this rank's row of rank r's `input`.
  Works all_to_all(at::Tensor output, at::Tensor input);
  Works all_reduce(at::Tensor tensor, ReduceOp op);
  Works broadcast(at::Tensor tensor, int root);
  Works barrier(c10::Device device);

 private:
  /// What there is something else for, where the backend lacks it.
  enum Operation { kFlatGather, kCoalescedGather, kFlatReduceScatter, kReduceScatter, kAllToAll, kOperations };
  enum class Support : uint8_t { kUnknown, kThere, kLacking };

  template <typename Call>
  Works unless_lacking(Operation operation, const at::Tensor& tensor, const Call& call);
  Works all_gather_list(at::Tensor output, at::Tensor input);
  Works reduce_scatter_list(at::Tensor output, at::Tensor input);
  Works all_reduce_rows(at::Tensor output, at::Tensor input);
  Works all_gather_rows(at::Tensor output, at::Tensor input);
  int size() const;

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::chrono::milliseconds timeout_;
  // Found out by the first call for each dtype, on the host and elsewhere. The same on all ranks, as they run the same
  // backend.
  using OfDtypes = std::array<std::array<Support, 2>, static_cast<size_t>(c10::ScalarType::NumOptions)>;
  std::array<OfDtypes, kOperations> support_{};
};

} // namespace fsdp::adapter
