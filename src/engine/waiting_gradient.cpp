#include "engine/waiting_gradient.h"

#include <utility>

#include "base/check.h"

namespace fsdp::engine {

void WaitingGradient::show(const at::Tensor& shard, at::Tensor whole) {
  whole_ = std::move(whole);
  own_ = std::exchange(shard.mutable_grad(), whole_);
}

bool WaitingGradient::take_back(const at::Tensor& shard, const std::string& name) {
  const at::Tensor whole = std::exchange(whole_, {});
  const at::Tensor shown = std::exchange(shard.mutable_grad(), {});
  const at::Tensor own = std::exchange(own_, {});
  if (!shown.defined()) {
    return false;
  }
  shard.mutable_grad() = own;
  if (!shown.is_same(whole)) {
    FSDP_CHECK(
        shown.sizes() == whole.sizes(),
        "[backward] the gradient of '{}' was replaced by one of sizes {} while it was whole, as no backward has "
        "reduced "
        "it yet: it has sizes {} until one without no_sync does",
        name,
        shown.sizes(),
        whole.sizes());
    whole.copy_(shown);
  }
  return true;
}

at::Tensor WaitingGradient::own(const at::Tensor& shard) const {
  return is_shown() && shard.grad().defined() ? own_ : shard.grad();
}

} // namespace fsdp::engine
