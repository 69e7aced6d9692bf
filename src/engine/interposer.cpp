// Sees every operator that is given a handle, a shard or a view of one, before it runs.

#include <exception>
#include <memory>
#include <optional>
#include <type_traits>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "base/caller.h"
#include "base/check.h"
#include "engine/at_work.h"
#include "engine/checkpoint_scope.h"
#include "engine/interposer.h"
#include "engine/no_autocast_cache.h"
#include "engine/operators.h"
#include "engine/param.h"
#include "engine/recording.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// What one operator call has to do with sharded parameters.
struct Call {
  const OperatorTraits& traits;
  const std::string& name;
  const int task = torch::autograd::get_current_graph_task_id(); // a backward; negative: none
  TouchedUnits units;
  const Param* first_handle = nullptr;
  const Param* first_number = nullptr; // of those handles that are computed with in `param_dtype`, if there is one
  const Param* written_shard = nullptr;
  struct Written {
    std::shared_ptr<Unit> unit; // stays whole until the operator has run
    Param* handle; // whose shard does not have it yet
  };
  c10::SmallVector<Written, 1> written;

  Call(const OperatorTraits& traits, const std::string& name) : traits(traits), name(name) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    for (const auto& [unit, param] : written) {
      param->bucket().expect_writes();
      --unit->held;
    }
  }
};

// `view`: the handle, or a view of it, which need not be part of a graph.
void note_use(Param& param, const at::Tensor& view, Phase phase) {
  if (phase != Phase::kForward || !param.trainable()) {
    return;
  }
  if (CheckpointForward::current() >= 0) {
    param.note_checkpointed_use(CheckpointForward::current());
  } else if (!c10::GradMode::is_enabled() || !view.requires_grad()) {
    return;
  }
  param.unit().runtime().forward_begins();
}

// What users have set on the shard since, before a graph, or a view that stays, takes the former along.
void follow_shard(Param& param) {
  param.follow_requires_grad();
  if (param.shard_was_replaced()) {
    const AtWork at_work(param.unit().runtime());
    param.unit().settle_replaced_shards();
  }
}

void see_handle(Param& param, const at::Tensor& view, bool written, Call& call) {
  const Phase phase = param.unit().runtime().phase_in(call.task);
  const bool records = phase == Phase::kForward || c10::GradMode::is_enabled();
  if (records) {
    follow_shard(param);
  }
  if (call.traits.reads_nothing) {
    return;
  }
  Unit& unit = param.unit();
  if (written) {
    FSDP_CHECK(
        call.name != "aten::embedding_renorm_" || unit.mesh().numel() == 1,
        "[embedding] max_norm renormalizes the rows of '{}' that are asked for, and each rank asks for others: leave "
        "max_norm out, and renormalize the shards, which parameters() gives, after the optimizer's step",
        param.name());
    unit.runtime().write(unit, param);
    ++unit.held;
    call.written.push_back({unit.shared_from_this(), &param});
    return;
  }
  if (unit.has_params_on_meta()) { // before a step begins
    unit.check_materialized();
  }
  if (records) {
    note_use(param, view, phase);
  }
  if (std::find(call.units.begin(), call.units.end(), &unit) == call.units.end()) {
    call.units.push_back(&unit);
  }
  if (call.first_handle == nullptr) {
    call.first_handle = &param;
  }
  const bool may_be_cast = c10::isFloatingType(param.gathered_dtype()) || param.bucket().is_extended();
  if (call.first_number == nullptr && may_be_cast) {
    call.first_number = &param;
  }
}

void see_shard(Param& param, bool written, Call& call) {
  if (written) {
    param.unit().before_shard_write(param);
    call.written_shard = &param;
  } else if (!call.traits.reads_nothing) {
    param.unit().before_shard_read(&param);
  }
}

// What an operator has written to handles reaches the shards at once: whoever looks at their memory finds it there.
// What fails for one does not keep the others from it.
void keep_writes(Call& call) {
  if (call.written.empty() || call.traits.writes_later) {
    return;
  }
  const auto written = std::exchange(call.written, {});
  for (const auto& each : written) {
    --each.unit->held;
  }
  std::exception_ptr failure;
  for (const auto& [unit, param] : written) {
    const AtWork at_work(unit->runtime());
    try {
      if (unit->held == 0) { // else a guard decides what becomes of it
        unit->write_back(*param);
      }
    } catch (...) {
      failure = failure ? failure : std::current_exception();
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

[[noreturn]] void refuse_gradient(const Tenant& tenant, const Call& call) {
  fail(
      "[gradient of '{}'] is on the shard that parameters() gives, but {} was given the gradient of a sharded "
      "parameter's handle, which holds no values. Build the optimizer from the model's parameters() after fully_shard, "
      "and read gradients there; where such a weight is tied to a module that is not sharded, call fully_shard on a "
      "module above both",
      tenant.param != nullptr ? tenant.param->name() : "a former parameter",
      call.name);
}

void see(const at::Tensor& tensor, bool written, Call& call) {
  Tenant* tenant = tenant_of(tensor);
  if (tenant == nullptr) {
    return;
  }
  if (tenant->role == Role::kGradient) {
    if (!call.traits.reads_nothing) {
      refuse_gradient(*tenant, call);
    }
  } else if (tenant->param != nullptr) {
    tenant->role == Role::kHandle ? see_handle(*tenant->param, tensor, written, call)
                                  : see_shard(*tenant->param, written, call);
  } else if (tenant->role == Role::kRecorded && !call.traits.reads_nothing) {
    use_recorded(tensor, call.name);
  }
}

// A tensor, an optional one, or lists of them.
void see_argument(const c10::IValue& argument, bool written, Call& call) {
  if (argument.isTensor()) {
    see(argument.toTensor(), written, call);
  } else if (argument.isList()) {
    for (const c10::IValue& item : argument.toListRef()) {
      if (!item.isTensor() && !item.isList() && !item.isNone()) {
        break; // a list of numbers
      }
      see_argument(item, written, call);
    }
  }
}

void see_arguments(c10::ArrayRef<c10::IValue> arguments, Call& call) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    see_argument(arguments[i], call.traits.writes_argument(i), call);
  }
}

bool needs_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype &&
         tenant_of(tensor) == nullptr;
}

// With a param_dtype, activations of another dtype meet the parameters: cast them where torch would refuse.
void cast_inputs(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType dtype) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& argument = stack[stack.size() - count + i];
    if (argument.isTensor()) {
      const auto& name = schema.arguments()[i].name();
      const auto* alias = schema.arguments()[i].alias_info();
      // What is written must stay the user's: `out`, and the statistics, which have full precision. As masks have.
      const bool stays = (alias != nullptr && alias->isWrite()) || name == "running_mean" || name == "running_var" ||
                         name == "attn_mask";
      if (!stays && needs_cast(argument.toTensor(), dtype)) {
        argument = argument.toTensor().to(dtype);
      }
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> cast;
      for (const at::Tensor& item : argument.toTensorVector()) {
        cast.push_back(needs_cast(item, dtype) ? item.to(dtype) : item);
      }
      argument = std::move(cast);
    }
  }
}

bool is_in_use(const Unit& unit, const Call& call) {
  const Runtime& runtime = unit.runtime();
  const Phase phase = runtime.phase_in(call.task);
  const bool is_noted = runtime.sees_all_writes() && (call.task >= 0 || runtime.reads_are_noted());
  return unit.is_in_use(phase) && (is_noted || !Runtime::trains(phase)) &&
         (phase == Phase::kForward || runtime.in_backward());
}

// What a collective writes to handles reaches the shards when these are read, perhaps by one rank alone. It is a write
// of all ranks, so all begin it here.
void begin_writes(const Call& call) {
  for (const auto& [unit, param] : call.written) {
    const AtWork at_work(unit->runtime());
    if (unit->summoned == 0) { // else a guard's end does
      unit->runtime().shards_change();
      param->bucket().begin_write();
    }
  }
}

void touch(Call& call) {
  if (call.traits.writes_later) {
    begin_writes(call);
  }
  if (call.units.empty()) {
    return;
  }
  FSDP_CHECK( // the gather would tell the others that the write is over
      call.written_shard == nullptr,
      "[{}] reads the whole '{}' and writes the shard of '{}' at once: clone() what it reads before",
      call.name,
      call.first_handle->name(),
      call.written_shard->name());
  if (std::all_of(call.units.begin(), call.units.end(), [&](const Unit* unit) { return is_in_use(*unit, call); })) {
    return;
  }
  WithoutCallersLock no_callers_lock;
  // Units of several roots: each root's runtime sees its own.
  for (size_t begin = 0; begin < call.units.size();) {
    Runtime& next = call.units[begin]->runtime();
    auto end = std::stable_partition(
        call.units.begin() + begin, call.units.end(), [&](const Unit* unit) { return &unit->runtime() == &next; });
    next.touch(TouchedUnits(call.units.begin() + begin, end));
    if (begin == 0 && end == call.units.end()) {
      return;
    }
    begin = end - call.units.begin();
  }
  for (Unit* unit : call.units) { // a later root may have had to write shards, for which all readers let go
    const AtWork at_work(unit->runtime());
    unit->unshard();
    unit->wait();
  }
}

/// The dtype that activations have to have for this operator, if they are to be cast.
std::optional<c10::ScalarType> dtype_to_cast_to(const Call& call, bool autocast) { // autocast casts what it wants to
  if (!call.traits.dtypes_must_agree || call.first_number == nullptr || autocast) {
    return std::nullopt;
  }
  const auto& precision = call.first_number->unit().precision();
  if (!precision.cast_forward_inputs || !precision.param_dtype) {
    return std::nullopt;
  }
  return call.first_number->dtype_to_meet(*precision.param_dtype);
}

c10::DispatchKeySet keys_below(c10::DispatchKey key, c10::DispatchKeySet keys) {
  return (keys - kKeys) & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
}

/// Puts handles in the place of shards; false if there are none.
bool give_handles(c10::IValue& weights) {
  auto tensors = weights.toTensorVector();
  bool any = false;
  for (auto& tensor : tensors) {
    Param* param = param_of(tensor);
    if (param != nullptr && !is_handle(tensor)) {
      const auto lock = param->unit().runtime().lock();
      tensor = param->handle();
      param->remind_holders();
      any = true;
    }
  }
  if (any) {
    weights = std::move(tensors);
  }
  return any;
}

// `torch::nn::LSTM` and the like keep their weights in a list, which their `to()` fills with the registered tensors;
// and have cuDNN put them in a row, which is nothing for memory that comes and goes.
bool intercept_weights(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack* stack) {
  if (call.traits.weights < 0) {
    return false;
  }
  const size_t count = op.schema().arguments().size();
  c10::IValue& weights = torch::jit::peek(*stack, call.traits.weights, count);
  const bool puts_in_a_row = op.schema().name() == "aten::_cudnn_rnn_flatten_weight";
  if (puts_in_a_row) {
    torch::jit::drop(*stack, count);
    torch::jit::push(*stack, at::Tensor());
    return true;
  }
  if (!give_handles(weights)) {
    return false;
  }
  op.callBoxed(stack);
  return true;
}

void intercept_at(
    c10::DispatchKey key, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(traits_of(op), schema.name());
  if (intercept_weights(op, call, stack)) {
    return;
  }
  called_by_torch([&] {
    see_arguments(torch::jit::last(*stack, schema.arguments().size()), call);
    touch(call);
  });
  const bool autocast = keys.has_any(c10::autocast_dispatch_keyset);
  if (const auto dtype = dtype_to_cast_to(call, autocast)) {
    cast_inputs(schema, *stack, *dtype);
  }
  {
    NoAutocastCache no_cache(autocast);
    c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
    op.redispatchBoxed(keys_below(key, keys), stack);
  }
  called_by_torch([&] { keep_writes(call); });
}

// Tensors in lists of lists have no say in where an operator goes, so that such operators are looked at on their way
// through autograd.
void intercept_lists_of_lists(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool seen = c10::impl::tls_is_dispatch_key_excluded(kKey);
  Call call(traits_of(op), op.schema().name());
  if (!seen) {
    called_by_torch([&] {
      see_arguments(torch::jit::last(*stack, op.schema().arguments().size()), call);
      touch(call);
    });
  }
  c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

template <class Argument>
void see_unboxed(const Argument& argument, bool written, Call& call) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    see(argument, written, call);
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    if (argument) {
      see(*argument, written, call);
    }
  }
}

template <class Argument>
Argument cast_unboxed(const Argument& argument, c10::ScalarType dtype) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) {
    return needs_cast(argument, dtype) ? argument.to(dtype) : argument;
  } else if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    return argument && needs_cast(*argument, dtype) ? argument->to(dtype) : argument;
  } else {
    return argument;
  }
}

/// The same for one operator, without boxes around its arguments, which cost as much as all the rest.
template <class Op, class Schema = typename Op::schema>
struct Unboxed;

template <class Op, class Result, class... Arguments>
struct Unboxed<Op, Result(Arguments...)> {
  static Result intercept(c10::DispatchKeySet keys, Arguments... arguments) {
    if (Recording::is_active()) [[unlikely]] {
      return intercept_boxed(keys, arguments...);
    }
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    Call call(traits_of(op), op.schema().name());
    called_by_torch([&] {
      size_t i = 0;
      (see_unboxed(arguments, call.traits.writes_argument(i++), call), ...);
      touch(call);
    });
    const bool autocast = keys.has_any(c10::autocast_dispatch_keyset);
    const auto dtype = dtype_to_cast_to(call, autocast);
    NoAutocastCache no_cache(autocast);
    c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
    const auto below = keys_below(kKey, keys);
    return dtype ? Op::redispatch(below, cast_unboxed(arguments, *dtype)...) : Op::redispatch(below, arguments...);
  }

 private:
  static Result intercept_boxed(c10::DispatchKeySet keys, Arguments... arguments) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    fsdp::engine::intercept(op, keys, &stack);
    return c10::impl::PopResult<Result>::call(stack);
  }
};

} // namespace

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::optional<Recording::Pause> pause; // of what is sharded already
  if (Recording::is_active()) [[unlikely]] {
    bool recorded = false;
    called_by_torch([&] { recorded = record(op, keys, stack); });
    if (recorded) {
      return;
    }
    pause.emplace();
  }
  intercept_at(kKey, op, keys, stack);
}

void intercept_inside(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  intercept_at(kInnerKey, op, keys, stack);
}

} // namespace fsdp::engine

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::intercept>());
}

// The operators of the commonest layers. None of them writes, or keeps the dtype of, one of its arguments.
TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  using fsdp::engine::Unboxed;
  library.impl("t", TORCH_FN(Unboxed<at::_ops::t>::intercept));
  library.impl("transpose.int", TORCH_FN(Unboxed<at::_ops::transpose_int>::intercept));
  library.impl("mm", TORCH_FN(Unboxed<at::_ops::mm>::intercept));
  library.impl("addmm", TORCH_FN(Unboxed<at::_ops::addmm>::intercept));
  library.impl("embedding", TORCH_FN(Unboxed<at::_ops::embedding>::intercept));
  library.impl("native_layer_norm", TORCH_FN(Unboxed<at::_ops::native_layer_norm>::intercept));
  library.impl("native_layer_norm_backward", TORCH_FN(Unboxed<at::_ops::native_layer_norm_backward>::intercept));
}

TORCH_LIBRARY_IMPL(c10d, Autograd, library) {
  for (const char* name : {"allgather_", "allgather_coalesced_", "reduce_scatter_", "gather_", "scatter_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::intercept_lists_of_lists>());
  }
}

// So that writes past all operators can be announced as one. Whoever writes says so before.
TORCH_LIBRARY_FRAGMENT(fsdp, library) {
  library.def("note_write_(Tensor(a!) written) -> ()");
}
TORCH_LIBRARY_IMPL(fsdp, CompositeExplicitAutograd, library) {
  library.impl("note_write_", [](const at::Tensor&) {});
}

TORCH_LIBRARY_IMPL(_, CustomRNGKeyId, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::intercept_inside>());
}

// Kernels for all backends (copy_, the foreach operators) count as this key's too and go before its fallback.
TORCH_LIBRARY_IMPL(aten, CustomRNGKeyId, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const bool for_all_backends =
        op && name.getNamespace() == "aten" &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional));
    if (for_all_backends) {
      const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::intercept_inside>());
    }
  }
}
