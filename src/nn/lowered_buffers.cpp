#include "nn/lowered_buffers.h"

#include <mutex>
#include <unordered_map>

#include "engine/internal_scope.h"
#include "engine/tenant.h"

namespace fsdp::nn::lowered_buffers {

namespace {

using engine::WeakTensor;

struct Lowered {
  WeakTensor buffer;
  c10::ScalarType saved;
};

std::mutex mutex;
std::unordered_map<const c10::TensorImpl*, Lowered> all;

void remember(const at::Tensor& buffer) {
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& item) { return item.second.buffer.expired(); });
  all.try_emplace(buffer.unsafeGetTensorImpl(), Lowered{WeakTensor(buffer.getIntrusivePtr()), buffer.scalar_type()});
}

void set_dtype(at::Tensor buffer, c10::ScalarType dtype) {
  const engine::InternalScope scope;
  buffer.set_data(buffer.to(dtype));
}

} // namespace

void lower(const at::Tensor& buffer, c10::ScalarType dtype) {
  if (buffer.scalar_type() != dtype) {
    remember(buffer);
    set_dtype(buffer, dtype);
  }
}

void restore(const at::Tensor& buffer) {
  if (const auto saved = saved_dtype(buffer); buffer.scalar_type() != saved) {
    set_dtype(buffer, saved);
  }
}

c10::ScalarType saved_dtype(const at::Tensor& buffer) {
  const std::lock_guard lock(mutex);
  const auto found = all.find(buffer.unsafeGetTensorImpl());
  return found == all.end() ? buffer.scalar_type() : found->second.saved;
}

} // namespace fsdp::nn::lowered_buffers
