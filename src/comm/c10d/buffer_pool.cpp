#include "comm/c10d/buffer_pool.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::adapter {
namespace {

constexpr size_t kIdleBuffers = 8;

bool fits(const at::Tensor& buffer, int64_t bytes) {
  return buffer.numel() >= bytes && buffer.numel() <= 2 * bytes;
}

/// Null if the group's backend for `device` leaves allocation to LibTorch, or if it has none.
c10::intrusive_ptr<c10d::Backend> allocating_backend(c10d::ProcessGroup& process_group, c10::Device device) {
  try {
    auto backend = process_group.getBackend(device.type());
    return backend->supportsTensorAlloc(device.index()) ? backend : nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

} // namespace

at::Tensor BufferPool::take(int64_t bytes, c10::Device device) {
  if (device.is_cpu()) {
    const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const auto& b) { return fits(b, bytes); });
    if (found != idle_.end()) {
      at::Tensor buffer = std::move(*found);
      idle_.erase(found);
      return buffer;
    }
    // Idle memory makes way, so that the pool never raises the peak.
    for (int64_t freed = 0; freed < bytes && !idle_.empty(); idle_.pop_front()) {
      freed += idle_.front().numel();
    }
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  if (process_group_) {
    if (const auto backend = allocating_backend(*process_group_, device)) {
      return backend->allocateTensor(bytes, options);
    }
  }
  return at::empty({bytes}, options);
}

void BufferPool::give_back(at::Tensor buffer) {
  if (!buffer.defined() || !buffer.device().is_cpu()) {
    return;
  }
  idle_.push_back(std::move(buffer));
  if (idle_.size() > kIdleBuffers) {
    idle_.pop_front();
  }
}

void BufferPool::set_backend(c10::intrusive_ptr<c10d::ProcessGroup> process_group) {
  process_group_ = std::move(process_group);
  clear();
}

} // namespace fsdp::adapter
