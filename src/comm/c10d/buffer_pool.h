#pragma once

#include <cstdint>
#include <deque>

#include <ATen/core/Tensor.h>

namespace c10d {
class ProcessGroup;
}

namespace fsdp::adapter {

/// Byte buffers on the host that are used again and again, because fresh memory costs a page fault every 4 KiB. Device
/// buffers are the caching allocator's business and pass through. Not thread safe.
class BufferPool {
 public:
  at::Tensor take(int64_t bytes, c10::Device device);
  /// For a buffer that nobody reads or writes any more.
  void give_back(at::Tensor buffer);
  void clear() {
    idle_.clear();
  }
  /// New buffers are memory of this group's backend, where that has its own; null: LibTorch's.
  void set_backend(c10::intrusive_ptr<c10d::ProcessGroup> process_group);

 private:
  std::deque<at::Tensor> idle_; // oldest first
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
};

} // namespace fsdp::adapter
