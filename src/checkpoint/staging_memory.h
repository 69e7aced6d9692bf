#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// Host memory for copies of tensors. The largest that was let go of serves the next one: memory that is new takes ten
/// times as long as copying into it.
class StagingMemory {
 public:
  /// `keep`: for the next, once this is gone.
  StagingMemory(int64_t bytes, bool keep);
  StagingMemory(StagingMemory&&) noexcept = default;
  StagingMemory& operator=(StagingMemory&&) = delete;
  ~StagingMemory();

  /// What a copy of so many bytes takes of it.
  static int64_t taken_by(int64_t bytes);
  /// For the same elements, side by side on the host.
  at::Tensor place_for(const at::Tensor& elements);

 private:
  struct Memory {
    std::unique_ptr<std::byte[]> begin{};
    int64_t bytes = 0;
  };
  static Memory& kept();

  Memory memory_{};
  int64_t bytes_, used_ = 0;
  bool keep_;
};

} // namespace fsdp::disk
