#include "engine/recording.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "base/check.h"
#include "engine/given_tensors.h"
#include "engine/internal_scope.h"
#include "engine/operator_trial.h"
#include "engine/tensor_arguments.h"

namespace fsdp::engine {

namespace {

bool is_tensor_or_list(const c10::Argument& result) {
  return result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), is_tensor_or_list);
}

bool returns_new_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return is_tensor_or_list(result) && result.alias_info() == nullptr;
  });
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) || index_of_argument(op.schema(), "generator") >= 0;
}

bool has_digits(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

// In place of what is recorded, among an operation's arguments.
const at::Tensor& placeholder() {
  static const auto* empty = [] {
    const InternalScope scope;
    return new at::Tensor(at::empty({0}, c10::kMeta));
  }();
  return *empty;
}

// A copy of what may go without a word: memory that somebody else owns (`from_blob`).
Constant constant_of(const at::Tensor& tensor) {
  const InternalScope scope;
  const bool is_owned = tensor.storage().nbytes() == 0 || tensor.storage().data_ptr().get_context() != nullptr;
  const at::Tensor kept = is_owned && !tensor.is_inference() ? tensor.tensor_data() : tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    kept.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return {kept, kept.unsafeGetTensorImpl()->version_counter().current_version()};
}

class RecordedCall {
 public:
  RecordedCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : op_(op), traits_(traits_of(op)), keys_(keys), stack_(stack), given_(op, *stack) {}

  void run_or_record() {
    if (only_asks_or_views() || is_on_meta() || has_unusual_tensors()) {
      return run_as_it_is();
    }
    refuse_communication();
    end_writes_by_address();
    if (writes_plain_tensors() || (!given_.any_written() && !returns_tensors(op_.schema()))) {
      return given_.any_recorded() ? run_on_values() : run_as_it_is();
    }
    record();
  }

 private:
  const std::string& name() const {
    return op_.schema().name();
  }

  bool only_asks_or_views() const {
    return (traits_.reads_nothing && !returns_new_tensors(op_.schema())) || op_.hasTag(at::Tag::inplace_view);
  }

  bool is_on_meta() const {
    const c10::IValue* device = given_.argument("device");
    return (device != nullptr && device->isDevice() && device->toDevice().is_meta()) ||
           given_.any([](const GivenTensor& given) { return given.tensor.is_meta(); });
  }

  /// Sparse ones, say: nothing of the kind is recorded.
  bool has_unusual_tensors() const {
    const bool any = given_.any(
        [](const GivenTensor& given) { return given.tensor.layout() != c10::kStrided || !given.tensor.has_storage(); });
    FSDP_CHECK(
        !any || !given_.any_recorded(),
        "[deferred_init] {} was given a tensor that is recorded together with one that is not strided: make both "
        "before deferred_init, or that part of the model after it",
        name());
    return any;
  }

  void refuse_communication() const {
    FSDP_CHECK(
        !traits_.writes_later || !given_.any_recorded(),
        "[deferred_init] {} communicates values, but its tensor is recorded and has none yet: do that after "
        "fully_shard, or set FullyShardOptions::sync_module_states",
        name());
  }

  bool writes_plain_tensors() const {
    bool plain = false, recorded = false;
    for (const GivenTensor& given : given_.all()) {
      plain = plain || (given.written && given.recorded == nullptr);
      recorded = recorded || (given.written && given.recorded != nullptr);
    }
    FSDP_CHECK(
        !plain || !recorded,
        "[deferred_init] {} writes tensors that are recorded together with others: call it for each kind by itself",
        name());
    return plain;
  }

  // What LibTorch has written where an operator now reads.
  void end_writes_by_address() const {
    for (const GivenTensor& given : given_.all()) {
      if (given.recorded != nullptr && !traits_.reads_nothing) {
        engine::end_writes_by_address(given.tensor, given.whole_storage_is_overwritten());
      }
    }
  }

  void refuse_write_to_leaf() const {
    for (const GivenTensor& given : given_.all()) {
      const at::Tensor& tensor = given.tensor;
      const bool tracked = given.written && c10::GradMode::is_enabled() && tensor.requires_grad();
      TORCH_CHECK(
          !tracked || !(tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf())),
          "a leaf Variable that requires grad is being used in an in-place operation (",
          name(),
          ", in deferred_init): write it under torch::NoGradGuard");
    }
  }

  // It would come after the recording, and find values of other dtypes.
  void refuse_autocast() const {
    const c10::DispatchKeySet autocast = keys_ & c10::autocast_dispatch_keyset;
    const bool may_cast = given_.any([](const GivenTensor& given) {
      return given.tensor.is_floating_point() && given.tensor.scalar_type() != c10::kDouble;
    });
    FSDP_CHECK(
        autocast.empty() || !may_cast || !op_.hasKernelForDispatchKey(autocast.highestPriorityTypeId()),
        "[deferred_init] {} is called under autocast, which what is recorded does not know: turn it off around this, "
        "and cast there",
        name());
  }

  // `out=` of an empty tensor, say.
  void refuse_resizes(const OperatorTrial& trial) const {
    for (size_t i = 0; i < given_.all().size(); ++i) {
      const GivenTensor& given = given_.all()[i];
      FSDP_CHECK(
          !given.written || trial.given[i].sizes() == given.tensor.sizes(),
          "[deferred_init] {} resizes a tensor of sizes {} to {}: give it one of these sizes, or take its result",
          name(),
          given.tensor.sizes(),
          trial.given[i].sizes());
    }
  }

  void return_instead(const torch::jit::Stack& returned) {
    torch::jit::drop(*stack_, op_.schema().arguments().size());
    stack_->insert(stack_->end(), returned.begin(), returned.end());
  }

  void run_as_it_is() const {
    const c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
    op_.redispatchBoxed((keys_ - kKeys) & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack_);
  }

  // For what it returns, or writes elsewhere.
  void run_on_values() {
    auto stack = given_.arguments_with(given_.with_values());
    {
      const c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
      op_.callBoxed(stack);
    }
    return_instead(stack);
  }

  at::Generator generator() const {
    const c10::IValue* given = given_.argument("generator");
    auto generator = given != nullptr && given->isGenerator()
                         ? given->toGenerator()
                         : at::globalContext().defaultGenerator(given_.device_of_results().value_or(c10::kCPU));
    const std::lock_guard lock(generator.mutex());
    return generator.clone();
  }

  void record() {
    refuse_write_to_leaf();
    refuse_autocast();
    const auto operation = std::make_shared<Operation>(op_);
    if (is_random(op_)) {
      operation->generator = generator();
    }
    const OperatorTrial trial = is_random(op_) ? try_operator_on_values(given_) : try_operator(given_);
    if (!given_.any_written() && returned_views(trial)) { // what may copy (`contiguous`) need not
      return run_as_it_is();
    }
    refuse_resizes(trial);
    describe_arguments(*operation);
    const auto returned = results_of(trial, *operation);
    note_dtype(*operation);
    note_written_by(operation);
    return_instead(returned);
  }

  void describe_arguments(Operation& operation) const {
    std::vector<at::Tensor> tensors;
    for (const GivenTensor& given : given_.all()) {
      if (given.recorded != nullptr) {
        const bool values_matter = !traits_.reads_nothing && !given.whole_storage_is_overwritten();
        operation.tensors.emplace_back(described(given.tensor, values_matter));
        tensors.push_back(placeholder());
      } else {
        operation.tensors.emplace_back(std::nullopt);
        operation.constants.push_back(constant_of(given.tensor));
        tensors.push_back(operation.constants.back().tensor);
      }
    }
    operation.arguments = given_.arguments_with(tensors);
  }

  torch::jit::Stack results_of(const OperatorTrial& trial, Operation& operation) {
    torch::jit::Stack returned = trial.returned;
    for (c10::IValue& value : returned) {
      change_tensors(value, [&](at::Tensor& result) {
        operation.results.emplace_back();
        const auto same = std::find_if(
            trial.given.begin(), trial.given.end(), [&](const at::Tensor& tensor) { return tensor.is_same(result); });
        if (same != trial.given.end()) {
          result = given_.all()[same - trial.given.begin()].tensor;
          return;
        }
        const bool tracked = is_tracked(result, trial);
        result = recorded_like(result, trial);
        operation.results.back() = described(result, /*with_values=*/false);
        result = tracked ? with_graph(result) : result;
      });
    }
    return returned;
  }

  at::Tensor recorded_like(const at::Tensor& result, const OperatorTrial& trial) {
    FSDP_CHECK(
        result.layout() == c10::kStrided && !result.is_quantized(),
        "[deferred_init] {} makes a {} tensor, which cannot be recorded: make it before deferred_init, or after it",
        name(),
        result.layout());
    const InternalScope scope;
    const c10::Device device = trial.on_values ? result.device() : *given_.device_of_results();
    made_.push_back(make_recorded_tensor({result.sizes(), result.strides(), result.scalar_type(), device}));
    return made_.back();
  }

  bool is_tracked(const at::Tensor& result, const OperatorTrial& trial) const {
    if (!trial.on_values) {
      return result.requires_grad();
    }
    const bool reads_tracked = given_.any([](const GivenTensor& given) { return given.tensor.requires_grad(); });
    return c10::GradMode::is_enabled() && reads_tracked && !traits_.reads_nothing &&
           (result.is_floating_point() || result.is_complex());
  }

  // It has a history, as in an ordinary construction; but not one that could be gone back.
  at::Tensor with_graph(at::Tensor result) const {
    result.set_requires_grad(true);
    torch::autograd::DelayedError graph(
        "[deferred_init] backward came to " + name() +
            ", which was recorded without its graph: compute this in forward, or under torch::NoGradGuard",
        1);
    const c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
    return graph.apply({std::move(result)})[0];
  }

  // The default may be another one when it is run.
  void note_dtype(Operation& operation) const {
    const int dtype = index_of_argument(op_.schema(), "dtype");
    if (dtype >= 0 && given_.all().empty() && operation.arguments[dtype].isNone() && operation.results.size() == 1) {
      operation.arguments[dtype] = static_cast<int64_t>(operation.results[0]->dtype);
    } else if (gives_digits() && !reads_digits()) {
      operation.default_dtype = c10::get_default_dtype_as_scalartype();
    }
  }

  bool gives_digits() const {
    return std::any_of(made_.begin(), made_.end(), &has_digits) ||
           given_.any([](const GivenTensor& given) { return given.written && has_digits(given.tensor); });
  }

  bool reads_digits() const {
    return given_.any([](const GivenTensor& given) {
      return !given.written && has_digits(given.tensor) && !given.tensor.unsafeGetTensorImpl()->is_wrapped_number();
    });
  }

  void note_written_by(const std::shared_ptr<const Operation>& operation) const {
    for (const GivenTensor& given : given_.all()) {
      if (given.written) {
        given.recorded->values = operation;
      }
    }
    for (const at::Tensor& made : made_) {
      recorded_storage_of(made)->values = operation;
    }
    if (name() == "aten::empty" && made_.size() == 1 && made_[0].dim() == 1 && made_[0].is_cpu()) {
      let_write_by_address(made_[0]);
    }
  }

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack* stack_;
  GivenTensors given_;
  std::vector<at::Tensor> made_;
};

} // namespace

Recording::Recording() : keys_(kKey) {
  ++depth;
}

Recording::~Recording() {
  if (--depth == 0) {
    forget_scratch();
  }
}

Recording::Pause::Pause() : depth_(std::exchange(depth, 0)) {
  if (depth_ != 0) {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = keys.included_.remove(kKey);
    keys_.emplace(keys);
  }
}

Recording::Pause::~Pause() {
  depth = depth_;
}

void use_recorded(const at::Tensor& recorded, const std::string& operation) {
  FSDP_CHECK(
      !recorded.requires_grad(),
      "[{}] was given a parameter that deferred_init has recorded, and that has no memory yet: call fully_shard or "
      "FullyShardedDataParallel on its module, or fsdp::materialize(module) if it is not to be sharded; what is to "
      "change the values before that belongs into the function that deferred_init calls",
      operation);
  make_values(recorded);
}

bool record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  bool sharded = false;
  for (c10::IValue argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    change_tensors(argument, [&](const at::Tensor& tensor) {
      sharded = sharded || (tenant_of(tensor) != nullptr && recorded_storage_of(tensor) == nullptr);
    });
  }
  if (!sharded) {
    RecordedCall(op, keys, stack).run_or_record();
  }
  return !sharded;
}

} // namespace fsdp::engine
