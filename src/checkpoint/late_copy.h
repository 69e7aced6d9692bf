#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// A copy of a tensor that another thread makes later. Whoever is going to write to the tensor before that makes it:
/// then LibTorch calls a hook of the storage, which every operator and every `data_ptr()` passes. Its address stays.
/// What writes by an address that it has from before is not seen. Destroyed, it waits for whoever is copying.
class LateCopy {
 public:
  /// Of elements on the CPU, side by side, into memory of the same kind that outlives the copy. Null where there is no
  /// such hook, or another one is at work; and of memory that other processes or devices may know.
  static std::unique_ptr<LateCopy> make(const at::Tensor& from, at::Tensor& to);
  LateCopy(const LateCopy&) = delete;
  LateCopy& operator=(const LateCopy&) = delete;
  ~LateCopy();

  /// Returns once the values of the beginning are there. On any thread.
  void finish();

 private:
  class Memory;
  class Job;
  LateCopy(std::shared_ptr<Memory> memory, std::shared_ptr<Job> job);
  static void before_write(c10::StorageImpl* storage);

  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Job> job_;
};

} // namespace fsdp::disk
