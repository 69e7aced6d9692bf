#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::adapter {

/// Byte buffers on the host that are used again and again, because fresh memory costs a page fault every 4 KiB. Device
/// buffers are the caching allocator's business and pass through. Not thread safe.
class BufferPool {
 public:
  using Idle = std::deque<at::Tensor>; // oldest first
  /// Buffers are kept as long as somebody holds this.
  std::shared_ptr<Idle> keep_idle();
  at::Tensor take(int64_t bytes, c10::Device device);
  /// For a buffer that nobody reads or writes any more.
  void give_back(at::Tensor buffer);
  /// Where new buffers come from, instead of LibTorch's allocator; null: from there.
  using Allocate = std::function<at::Tensor(int64_t bytes, const at::TensorOptions&)>;
  void set_allocator(Allocate allocate);

 private:
  std::weak_ptr<Idle> idle_;
  Allocate allocate_;
};

} // namespace fsdp::adapter
