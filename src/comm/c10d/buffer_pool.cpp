#include "comm/c10d/buffer_pool.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

namespace fsdp::adapter {
namespace {

constexpr size_t kIdleBuffers = 8;

bool fits(const at::Tensor& buffer, int64_t bytes) {
  return buffer.numel() >= bytes && buffer.numel() <= 2 * bytes;
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
  return allocate_ ? allocate_(bytes, options) : at::empty({bytes}, options);
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

void BufferPool::set_allocator(Allocate allocate) {
  allocate_ = std::move(allocate);
  clear();
}

} // namespace fsdp::adapter
