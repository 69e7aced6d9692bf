#include <fsdp/front_end.h>

#include <algorithm>

#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <fsdp/held.h>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/bucket.h"
#include "engine/flat_shard.h"
#include "engine/put_together.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

engine::Param& param_behind(const at::Tensor& tensor, const char* operation) {
  engine::Param* param = engine::param_of(tensor);
  FSDP_CHECK(param != nullptr, "[{}] expected a sharded parameter, got another tensor", operation);
  return *param;
}

} // namespace

bool belongs_to_unit(const at::Tensor& tensor) {
  return engine::param_of(tensor) != nullptr;
}

bool is_intact_handle(const at::Tensor& tensor) {
  const engine::Param* param = engine::param_of(tensor);
  return param != nullptr && param->is_handle(tensor);
}

void restore_handle(const FSDPModule& module, const at::Tensor& handle) {
  const auto& params = module.unit()->params();
  const auto found =
      std::find_if(params.begin(), params.end(), [&](const auto& param) { return param->is_handle(handle); });
  if (is_intact_handle(handle) || found == params.end()) {
    return;
  }
  c10::AutoGradMode no_grad(false);
  engine::Param& param = **found;
  FSDP_CHECK(
      handle.sizes() == c10::IntArrayRef(param.layout().sizes()),
      "[set data of parameter] '{}' has sizes {}, and was given data of sizes {}: a sharded parameter keeps its sizes; "
      "resize the model (resize_token_embeddings, say) before fully_shard",
      param.name(),
      c10::IntArrayRef(param.layout().sizes()),
      handle.sizes());
  const at::Tensor given = handle.clone(); // which may be another handle's
  {
    auto lock = module.unit()->runtime().lock();
    param.become_handle(handle, param.gathered_dtype());
    param.bucket().place(param);
  }
  try {
    if (!param.on_meta() && !at::equal(handle, given.to(handle.options()))) {
      handle.copy_(given);
    }
  } catch (...) {
    engine::take_data(handle, given); // not lost: to be tried again
    throw;
  }
}

FSDPModule module_of(const at::Tensor& shard) {
  return FSDPModule(param_behind(shard, "module_of").unit().shared_from_this());
}

at::Tensor handle_of(const at::Tensor& shard) {
  auto& param = param_behind(shard, "handle_of");
  auto lock = param.unit().runtime().lock();
  return param.handle();
}

static engine::FlatShard* flat_shard_behind(const FSDPModule& module) {
  for (const auto& bucket : module.unit()->buckets()) {
    if (auto* flat = bucket->flat_shard()) {
      return flat;
    }
  }
  return nullptr;
}

at::Tensor flat_shard_of(const FSDPModule& module) {
  const auto* flat = flat_shard_behind(module);
  return flat != nullptr ? flat->tensor() : at::Tensor();
}

void set_flat_shard(const FSDPModule& module, const at::Tensor& tensor) {
  auto* flat = flat_shard_behind(module);
  FSDP_CHECK(flat != nullptr, "[set_flat_shard] the parameters of this module are not shown as one");
  auto lock = module.unit()->runtime().lock();
  flat->replace(tensor);
}

at::Tensor shard_behind(const at::Tensor& handle) {
  return param_behind(handle, "shard_behind").shard();
}

std::shared_ptr<ShownShard> shown_in_flat(const at::Tensor& handle) {
  const auto& param = param_behind(handle, "shown_in_flat");
  auto* flat = param.bucket().flat_shard();
  return flat != nullptr ? flat->shown_for(param) : nullptr;
}

void follow_requires_grad(const at::Tensor& tensor) {
  param_behind(tensor, "follow_requires_grad").follow_requires_grad();
}

static engine::PieceOf piece_behind(const at::Tensor& tensor, const std::optional<at::Tensor>& local) {
  const auto& param = param_behind(tensor, "full_tensors");
  param.unit().before_shard_read();
  const HeldTensor own = held(param.shard());
  return {&param, (local ? like(own, *local) : own).local.detach()};
}

std::vector<at::Tensor> full_tensors(
    const std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>>& pieces, c10::Device device) {
  std::vector<at::Tensor> wholes;
  std::vector<engine::PieceOf> together;
  const auto travel = [&] {
    if (together.empty()) {
      return;
    }
    const Label label = together.front().param->unit().label("full_tensors");
    const auto arrived = engine::put_together(together, device, label);
    wholes.insert(wholes.end(), arrived.begin(), arrived.end());
    together.clear();
  };
  for (const auto& [tensor, local] : pieces) {
    const engine::PieceOf piece = piece_behind(tensor, local);
    if (!together.empty() && &together.front().param->bucket() != &piece.param->bucket()) {
      travel();
    }
    together.push_back(piece);
  }
  travel();
  return wholes;
}

at::Tensor piece_of(const at::Tensor& shard, const at::Tensor& whole) {
  const auto& param = param_behind(shard, "piece_of");
  engine::InternalScope scope;
  return param.piece_of(whole);
}

void set_caller(
    void* (*let_go)(),
    void (*take_back)(void* token),
    void (*raise)(std::exception_ptr error),
    std::exception_ptr (*interruption)(),
    void (*raise_later)(std::exception_ptr error)) {
  set_caller(Caller{let_go, take_back, raise, interruption, raise_later});
}

static void begin_root(engine::Runtime& runtime) {
  runtime.follow_requires_grad();
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  runtime.note_call();
  if (runtime.awaits_step()) {
    const engine::AtWork at_work(runtime);
    runtime.begin_step(/*certainly=*/true);
  }
}

ModuleCall::ModuleCall(const FSDPModule& module) {
  auto& runtime = module.unit()->runtime();
  runtime.follow_profiler();
  if (module.unit()->parent() == nullptr) {
    begin_root(runtime);
    root_ = runtime.shared_from_this();
  }
  if (engine::Runtime::running_calls++ == 0) {
    engine::Runtime::call_trains = c10::GradMode::is_enabled();
  }
}

ModuleCall::~ModuleCall() {
  --engine::Runtime::running_calls;
  if (root_) {
    root_->call_ends();
  }
}

bool has_open_forward(const FSDPModule& module) {
  const bool recomputes = torch::autograd::get_current_graph_task_id() >= 0;
  return !recomputes && engine::Runtime::running_calls == 0 && module.unit()->runtime().in_forward();
}

void expect_calls(const FSDPModule& module) {
  module.unit()->runtime().expect_calls();
}

bool is_root(const FSDPModule& module) {
  return module.unit()->parent() == nullptr;
}

void compute_in(const FSDPModule& module, std::optional<c10::ScalarType> param_dtype) {
  engine::Unit& unit = *module.unit();
  if (unit.precision().param_dtype != param_dtype) {
    const engine::AtWork at_work(unit.runtime());
    unit.compute_in(param_dtype);
  }
}

void check_materialized(const FSDPModule& module) {
  if (module.unit()->has_params_on_meta()) {
    module.unit()->check_materialized();
  }
}

void set_comm_hook(
    const FSDPModule& module, const std::function<void(const at::Tensor&, at::Tensor&)>& hook, bool sharded) {
  engine::Unit& unit = *module.unit();
  unit.policy.divide_factor = 1;
  if (sharded) {
    unit.reduce_through([hook](at::Tensor& output, const at::Tensor& input, Group&) { hook(input, output); });
    return;
  }
  const auto reduce = [hook](at::Tensor& gradient) { hook(gradient, gradient); };
  unit.policy.all_reduce = reduce;
  if (unit.mesh().ndim() == 1) { // one rank, over which nothing is all-reduced
    unit.reduce_through([reduce](at::Tensor& output, const at::Tensor& input, Group&) {
      output.copy_(input);
      reduce(output);
    });
  }
}

void reduce_as_computed(const FSDPModule& module) {
  module.unit()->reduce_as_computed();
}

void show_waiting_gradients(const FSDPModule& module) {
  module.unit()->policy.shows_waiting_gradients = true;
}

void set_keep_gradient_dtype(const FSDPModule& module, bool keep) {
  module.unit()->policy.keep_gradient_dtype = keep;
}

void copy_settings(const FSDPModule& from, const FSDPModule& to) {
  auto& policy = to.unit()->policy;
  policy = from.unit()->policy;
  policy.forward_prefetch.clear();
  policy.backward_prefetch.clear();
  to.unit()->runtime().bound_reductions();
}

void show_as(const at::Tensor& shard, std::shared_ptr<ShownShard> shown) {
  auto& param = param_behind(shard, "show_as");
  const engine::AtWork at_work(param.unit().runtime());
  param.show_as(std::move(shown));
}

void show_in_place(const at::Tensor& shard, std::shared_ptr<ShownShard> shown) {
  auto& param = param_behind(shard, "show_in_place");
  const engine::AtWork at_work(param.unit().runtime());
  param.show_as(std::move(shown));
  param.adopt_replacement();
}

} // namespace fsdp
