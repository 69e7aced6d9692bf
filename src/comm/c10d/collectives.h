#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <fsdp/group.h>

namespace fsdp::adapter {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

/// The collectives of a c10d process group under one name each for all versions of LibTorch, with other collectives in
/// place of those that a backend lacks. Throws what c10d throws. Not thread safe.
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
  Works all_gather_list(at::Tensor output, at::Tensor input);
  Works reduce_scatter_list(at::Tensor output, at::Tensor input);
  Works all_reduce_rows(at::Tensor output, at::Tensor input);
  Works all_gather_rows(at::Tensor output, at::Tensor input);
  int size() const;

  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::chrono::milliseconds timeout_;
  // What the backend was found to lack; the same on all ranks, as they run the same backend.
  bool lacks_flat_gather_ = false;
  bool lacks_coalesced_gather_ = false;
  bool lacks_flat_reduce_scatter_ = false;
  bool lacks_reduce_scatter_ = false;
  bool lacks_all_to_all_ = false;
};

/// An exception's message without the C++ stack that c10 appends.
std::string message_of(const std::exception& error);

} // namespace fsdp::adapter
