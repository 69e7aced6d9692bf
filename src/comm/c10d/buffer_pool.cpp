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

std::shared_ptr<BufferPool::Idle> BufferPool::keep_idle() {
  auto idle = idle_.lock();
  if (!idle) {
    idle_ = idle = std::make_shared<Idle>();
  }
  return idle;
}

at::Tensor BufferPool::take(int64_t bytes, c10::Device device) {
  if (const auto idle = idle_.lock(); idle && device.is_cpu()) {
    const auto found = std::find_if(idle->begin(), idle->end(), [&](const auto& b) { return fits(b, bytes); });
    if (found != idle->end()) {
      at::Tensor buffer = std::move(*found);
      idle->erase(found);
      return buffer;
    }
    // Idle memory makes way, so that the pool never raises the peak.
    for (int64_t freed = 0; freed < bytes && !idle->empty(); idle->pop_front()) {
      freed += idle->front().numel();
    }
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return allocate_ ? allocate_(bytes, options) : at::empty({bytes}, options);
}

void BufferPool::give_back(at::Tensor buffer) {
  const auto idle = idle_.lock();
  if (!idle || !buffer.defined() || !buffer.device().is_cpu()) {
    return;
  }
  idle->push_back(std::move(buffer));
  if (idle->size() > kIdleBuffers) {
    idle->pop_front();
  }
}

void BufferPool::set_allocator(Allocate allocate) {
  allocate_ = std::move(allocate);
  if (const auto idle = idle_.lock()) {
    idle->clear();
  }
}

} // namespace fsdp::adapter
