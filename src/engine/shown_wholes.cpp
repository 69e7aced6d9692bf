#include "engine/shown_wholes.h"

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine::shown_wholes {
namespace {

struct Whole {
  std::weak_ptr<Unit> unit;
  Param* param = nullptr; // the unit's
};

class Registry {
 public:
  static Registry& get() {
    static auto* const registry = new Registry; // guards may end with the process
    return *registry;
  }
  void add(const at::Tensor& tensor, Whole whole) {
    const std::lock_guard guard(mutex_);
    wholes_.insert_or_assign(tensor.unsafeGetTensorImpl(), std::move(whole));
    count_ = wholes_.size();
  }
  void remove(const at::Tensor& tensor) {
    const std::lock_guard guard(mutex_);
    wholes_.erase(tensor.unsafeGetTensorImpl());
    count_ = wholes_.size();
  }
  Whole find(const at::Tensor& tensor) {
    if (count_ == 0) { // mostly
      return {};
    }
    const std::lock_guard guard(mutex_);
    const auto found = wholes_.find(tensor.unsafeGetTensorImpl());
    return found == wholes_.end() ? Whole() : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Whole> wholes_;
  std::atomic<size_t> count_ = 0;
};

} // namespace

void add(const at::Tensor& whole, Param& param) {
  Registry::get().add(whole, {param.unit().weak_from_this(), &param});
}

void remove(const at::Tensor& whole) {
  Registry::get().remove(whole);
}

std::shared_ptr<Unit> unit_of(const at::Tensor& tensor) {
  return Registry::get().find(tensor).unit.lock();
}

void was_given_data(const at::Tensor& tensor) {
  const Whole whole = Registry::get().find(tensor);
  if (const auto unit = whole.unit.lock()) {
    const InternalScope scope;
    const auto lock = unit->runtime().lock();
    unit->go_on_with(*whole.param, tensor);
  }
}

} // namespace fsdp::engine::shown_wholes
