#include "engine/shown_wholes.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine::shown_wholes {
namespace {

struct Whole {
  at::Tensor tensor;
  std::weak_ptr<Unit> unit;
  Param* param = nullptr; // the unit's
};

std::mutex mutex;
// Never destroyed: guards may end with the process.
auto& wholes = *new std::unordered_map<const c10::TensorImpl*, Whole>;
std::atomic<size_t> count = 0; // of them

Whole find(const at::Tensor& tensor) {
  if (count == 0) { // mostly
    return {};
  }
  const std::lock_guard guard(mutex);
  const auto found = wholes.find(tensor.unsafeGetTensorImpl());
  return found == wholes.end() ? Whole() : found->second;
}

/// Several guards may show it.
std::vector<at::Tensor> all_of(const Param& param) {
  const std::lock_guard guard(mutex);
  std::vector<at::Tensor> tensors;
  for (const auto& [key, whole] : wholes) {
    if (whole.param == &param) {
      tensors.push_back(whole.tensor);
    }
  }
  return tensors;
}

/// Users may want them in another dtype, or on another device, until the guard ends: to save them, say.
bool fits(const at::Tensor& given, const at::Tensor& copy) {
  return given.sizes() == copy.sizes() && given.scalar_type() == copy.scalar_type() && given.device() == copy.device();
}

} // namespace

void add(const at::Tensor& whole, Param& param) {
  const std::lock_guard guard(mutex);
  wholes.insert_or_assign(whole.unsafeGetTensorImpl(), Whole{whole, param.unit().weak_from_this(), &param});
  count = wholes.size();
}

void remove(const at::Tensor& whole) {
  const std::lock_guard guard(mutex);
  wholes.erase(whole.unsafeGetTensorImpl());
  count = wholes.size();
}

std::shared_ptr<Unit> unit_of(const at::Tensor& tensor) {
  return find(tensor).unit.lock();
}

// The values are copied: whose the data are may write them, or let them go. What was shown shows the copy.
void was_given_data(const at::Tensor& tensor) {
  const Whole given = find(tensor);
  const auto unit = given.unit.lock();
  if (!unit || !unit->is_private()) {
    return;
  }
  const InternalScope scope;
  const auto lock = unit->runtime().lock();
  const Bucket& bucket = given.param->bucket();
  const at::Tensor former = bucket.private_copy(*given.param);
  unit->go_on_with(*given.param, tensor);
  const at::Tensor copy = bucket.private_copy(*given.param);
  if (copy.is_same(former)) {
    return; // they do not fit, which the guard's end says
  }
  for (const at::Tensor& shown : all_of(*given.param)) {
    if ((shown.is_same(tensor) || shown.is_alias_of(former)) && fits(shown, copy)) {
      shown.set_data(copy.alias());
    }
  }
}

} // namespace fsdp::engine::shown_wholes
