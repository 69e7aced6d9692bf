// Sees what tensors' methods do to handles and shards that no operator shows.

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"
#include "engine/flat_bucket.h"
#include "engine/forwarding_hooks.h"
#include "engine/param.h"
#include "engine/piece_or_whole.h"
#include "engine/runtime.h"
#include "engine/shown_wholes.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// The parameter of a handle or a shard, unless the engine itself, or an operator, is at work on it.
Param* param_seen(const at::TensorBase& tensor) {
  if (!tensor.defined() || c10::impl::tls_is_dispatch_key_excluded(kKey)) {
    return nullptr;
  }
  return param_of(*at::OptionalTensorRef(tensor));
}

/// The same of a shard only.
Param* param_of_shard_seen(const at::TensorBase& tensor) {
  return param_seen(tensor) != nullptr ? param_of_shard(*at::OptionalTensorRef(tensor)) : nullptr;
}

bool is_in_a_graph(const at::TensorBase& leaf) {
  return torch::autograd::impl::try_get_grad_accumulator(leaf) != nullptr;
}

FlatShard* flat_shard_seen(const at::TensorBase& tensor) {
  if (!tensor.defined() || c10::impl::tls_is_dispatch_key_excluded(kKey)) {
    return nullptr;
  }
  FlatShard* flat = flat_shard_of(*at::OptionalTensorRef(tensor));
  return flat != nullptr && flat->tensor().is_same(tensor) ? flat : nullptr;
}

/// The parameters of a shard, or of a flat one.
std::vector<Param*> params_of_shard_seen(const at::Tensor& tensor) {
  if (Param* param = param_of_shard_seen(tensor)) {
    return {param};
  }
  const FlatShard* flat = flat_shard_seen(tensor);
  return flat != nullptr ? flat->bucket().params() : std::vector<Param*>();
}

/// Where gradients of these come to: of a shard, to its handle, and to itself where a penalty is made of shards.
std::vector<at::Tensor> leaves_of(at::TensorList inputs) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) {
    const auto params = params_of_shard_seen(input);
    for (Param* param : params) {
      param->follow_requires_grad();
      const auto lock = param->unit().runtime().lock();
      leaves.push_back(param->handle());
    }
    if (params.empty() || is_in_a_graph(input)) {
      leaves.push_back(input);
    }
  }
  return leaves;
}

// Shards and handles are memory: where it is to be seen otherwise, conjugated or negated, what is seen is worked out.
at::Tensor as_it_is_seen(const at::TensorBase& data) {
  const c10::AutoGradMode no_grad(false); // nor is that a read to train
  return at::OptionalTensorRef(data)->resolve_conj().resolve_neg();
}

struct Registering {
  static inline thread_local bool now = false;
  const bool before = std::exchange(now, true);
  ~Registering() {
    now = before;
  }
};

class TensorMethods final : public ForwardingHooks {
 public:
  using ForwardingHooks::ForwardingHooks;

  void set_data(const at::TensorBase& self, const at::TensorBase& data) const override {
    const bool is_ours = flat_shard_seen(self) != nullptr || param_seen(self) != nullptr;
    if (is_ours && (data.is_conj() || data.is_neg())) {
      set_data(self, as_it_is_seen(data));
      return;
    }
    if (FlatShard* flat = flat_shard_seen(self)) {
      const auto lock = flat->bucket().unit().runtime().lock();
      ForwardingHooks::set_data(self, data);
      flat->was_given_data();
      return;
    }
    Param* param = param_seen(self);
    if (param == nullptr) {
      check_is_no_piece(self, data);
      ForwardingHooks::set_data(self, data);
      if (self.defined() && !c10::impl::tls_is_dispatch_key_excluded(kKey)) {
        shown_wholes::was_given_data(*at::OptionalTensorRef(self));
      }
      return;
    }
    if (give_values(*at::OptionalTensorRef(self), *at::OptionalTensorRef(data))) {
      return;
    }
    const auto lock = param->unit().runtime().lock();
    const bool of_shard = param_of_shard_seen(self) != nullptr;
    ForwardingHooks::set_data(self, data);
    if (of_shard) {
      param->shard_was_given_data();
    }
  }

  void _backward(
      const at::Tensor& self,
      at::TensorList inputs,
      const std::optional<at::Tensor>& gradient,
      std::optional<bool> keep_graph,
      bool create_graph) const override {
    ForwardingHooks::_backward(self, leaves_of(inputs), gradient, keep_graph, create_graph);
  }

  unsigned _register_hook(
      const at::TensorBase& self, std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    const Registering scope;
    return ForwardingHooks::_register_hook(self, std::move(hook));
  }

  // Of a leaf only those ask who want to know where its gradient comes from.
  int64_t output_nr(const at::TensorBase& self) const override {
    const Param* shard_of = param_of_shard_seen(self); // first: of the tensors that are asked, nearly none is ours
    const Param* param = shard_of == nullptr || Registering::now || !self.requires_grad() ? nullptr : shard_of;
    FSDP_CHECK(
        param == nullptr || is_in_a_graph(self),
        "[autograd] '{}' was given as an input of autograd::grad or autograd::backward, as the shard that parameters() "
        "gives, of which the graph knows nothing: give the module's member, whose gradient is this rank's, whole and "
        "not reduced; or call loss.backward(gradient, retain_graph, create_graph, inputs), which takes shards",
        param->name());
    return ForwardingHooks::output_nr(self);
  }
};

// Before main, as LibTorch's own: no thread calls a method then.
[[maybe_unused]] const bool installed = [] {
  static const TensorMethods methods(*at::impl::GetVariableHooks()); // as long as the program
  at::impl::SetVariableHooks(const_cast<TensorMethods*>(&methods));
  return true;
}();

} // namespace

} // namespace fsdp::engine
