#include "engine/replay.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/hash.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "engine/tensor_arguments.h"

namespace fsdp::engine {

namespace {

/// An operator that cannot be given a generator draws from its device's, which is put back to a former state for it.
/// Another thread that draws from it in the meantime draws other numbers than it would, and so does the operator.
class FormerState {
 public:
  explicit FormerState(const at::Generator& former)
      : lock_(mutex()),
        generator_(at::globalContext().defaultGenerator(former.device())),
        state_(generator_.get_state()) {
    generator_.set_state(former.get_state());
  }
  ~FormerState() {
    generator_.set_state(state_);
  }
  FormerState(const FormerState&) = delete;
  FormerState& operator=(const FormerState&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex of_all_threads;
    return of_all_threads;
  }
  std::lock_guard<std::mutex> lock_;
  at::Generator generator_;
  at::Tensor state_;
};

/// `rand`, `randint` and their like have a second form that takes a generator.
std::optional<c10::OperatorHandle> form_with_generator(const c10::OperatorHandle& op) {
  const std::string& overload = op.schema().overload_name();
  const std::string with = overload.empty()          ? "generator"
                           : overload == "low_dtype" ? "low_generator_dtype"
                                                     : overload + "_generator";
  return c10::Dispatcher::singleton().findSchema({op.schema().name(), with});
}

/// For one operator, as it is the process's: one thread at a time.
class DefaultDtype {
 public:
  explicit DefaultDtype(std::optional<c10::ScalarType> dtype) {
    if (dtype) {
      lock_ = std::unique_lock(mutex_);
      before_ = c10::get_default_dtype();
      set(c10::scalarTypeToTypeMeta(*dtype));
    }
  }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;
  ~DefaultDtype() {
    if (lock_) {
      set(before_);
    }
  }

 private:
  static void set(caffe2::TypeMeta dtype) {
    if (c10::get_default_dtype() != dtype) {
      c10::set_default_dtype(dtype);
    }
  }

  inline static std::mutex mutex_;
  std::unique_lock<std::mutex> lock_;
  caffe2::TypeMeta before_;
};

void call(const Operation& operation, torch::jit::Stack& stack) {
  const DefaultDtype of_the_time(operation.default_dtype);
  if (!operation.generator.defined()) {
    return operation.op.callBoxed(stack);
  }
  if (const int generator = index_of_argument(operation.op.schema(), "generator"); generator >= 0) {
    stack[generator] = operation.generator.clone();
    return operation.op.callBoxed(stack);
  }
  if (const auto form = form_with_generator(operation.op)) {
    stack.insert(stack.begin() + index_of_argument(form->schema(), "generator"), operation.generator.clone());
    return form->callBoxed(stack);
  }
  const FormerState state(operation.generator);
  operation.op.callBoxed(stack);
}

bool lies_in(const at::Tensor& tensor, const RecordedTensor& expected) {
  return tensor.layout() == c10::kStrided && tensor.sizes() == c10::IntArrayRef(expected.sizes) &&
         tensor.strides() == c10::IntArrayRef(expected.strides) && tensor.storage_offset() == 0 &&
         tensor.scalar_type() == expected.dtype && tensor.device() == expected.memory->device &&
         tensor.storage().nbytes() == expected.memory->bytes && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor copy_as(const at::Tensor& tensor, const RecordedTensor& expected) {
  TORCH_INTERNAL_ASSERT(
      tensor.sizes() == c10::IntArrayRef(expected.sizes),
      "an operator's result has other sizes than when it was recorded");
  auto copy = at::empty_strided(
      expected.sizes, expected.strides, at::TensorOptions().dtype(expected.dtype).device(expected.memory->device));
  return copy.copy_(tensor);
}

} // namespace

void Replay::add(const RecordedTensor& wanted) {
  wanted_.emplace(wanted.memory.get(), wanted.memory);
  std::vector<std::shared_ptr<const Operation>> found{wanted.values};
  while (!found.empty()) {
    const auto operation = std::move(found.back());
    found.pop_back();
    if (operation == nullptr || !needed_.emplace(operation.get(), operation).second) {
      continue;
    }
    for (const auto& tensor : operation->tensors) {
      if (tensor) {
        found.push_back(tensor->values);
      }
    }
  }
}

std::vector<const Operation*> Replay::in_order() const {
  std::vector<const Operation*> operations;
  for (const auto& [operation, keeps] : needed_) {
    operations.push_back(operation);
  }
  std::sort(operations.begin(), operations.end(), [](auto* one, auto* other) { return one->number < other->number; });
  return operations;
}

void Replay::check() const {
  for (const auto* operation : in_order()) {
    for (const auto& constant : operation->constants) {
      FSDP_CHECK(
          constant.tensor.unsafeGetTensorImpl()->version_counter().current_version() == constant.version,
          "[deferred_init] a tensor of sizes {} from outside was given to {}, and has been written since, but its "
          "values "
          "are needed only now: give it a copy, clone(), or write the tensor after the parameters have their values",
          constant.tensor.sizes(),
          operation->op.schema().name());
    }
  }
}

void Replay::run() {
  const InternalScope scope;
  check();
  const auto operations = in_order();
  std::unordered_map<const Memory*, size_t> last_use;
  for (size_t i = 0; i < operations.size(); ++i) {
    for (const auto* tensors : {&operations[i]->tensors, &operations[i]->results}) {
      for (const auto& tensor : *tensors) {
        if (tensor) {
          last_use[tensor->memory.get()] = i;
        }
      }
    }
  }
  for (size_t i = 0; i < operations.size(); ++i) {
    run(*operations[i]);
    std::erase_if(
        storages_, [&](const auto& item) { return wanted_.count(item.first) == 0 && last_use.at(item.first) == i; });
  }
}

void Replay::run(const Operation& operation) {
  std::vector<at::Tensor> given;
  torch::jit::Stack stack;
  size_t next = 0;
  for (c10::IValue argument : operation.arguments) {
    change_tensors(argument, [&](at::Tensor& value) {
      if (const auto& recorded = operation.tensors[next++]) {
        value = tensor(*recorded);
      }
      given.push_back(value);
    });
    stack.push_back(std::move(argument));
  }
  call(operation, stack);
  keep_results(operation, stack, given);
}

void Replay::keep_results(
    const Operation& operation, c10::ArrayRef<c10::IValue> returned, const std::vector<at::Tensor>& given) {
  size_t next = 0;
  std::vector<at::Tensor> known = given;
  for (c10::IValue value : returned) {
    change_tensors(value, [&](at::Tensor& result) {
      const auto& expected = operation.results[next++];
      if (!expected) {
        return;
      }
      const bool is_alias = std::any_of(known.begin(), known.end(), [&](const at::Tensor& other) {
        return other.has_storage() && result.has_storage() && other.is_alias_of(result);
      });
      const at::Tensor kept = is_alias || !lies_in(result, *expected) ? copy_as(result, *expected) : result;
      storages_[expected->memory.get()] = kept.storage();
      known.push_back(kept);
    });
  }
}

at::Tensor Replay::tensor(const RecordedTensor& wanted) {
  const InternalScope scope;
  const auto options = at::TensorOptions().device(wanted.memory->device);
  auto found = storages_.find(wanted.memory.get());
  if (found == storages_.end()) { // what is in it does not matter
    const auto bytes = at::empty({static_cast<int64_t>(wanted.memory->bytes)}, options.dtype(c10::kByte));
    found = storages_.emplace(wanted.memory.get(), bytes.storage()).first;
  }
  auto tensor = at::empty({0}, options.dtype(wanted.dtype));
  tensor.set_(found->second, wanted.offset, wanted.sizes, wanted.strides);
  if (wanted.is_conj) {
    tensor = at::_conj(tensor);
  }
  if (wanted.is_neg) {
    tensor = at::_neg_view(tensor);
  }
  if (wanted.is_wrapped_number) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

std::string Replay::fingerprint() const {
  const InternalScope scope;
  std::ostringstream text;
  for (const auto* operation : in_order()) {
    text << operation->op.schema().name();
    for (const auto& argument : operation->arguments) {
      if (argument.isDouble() || argument.isInt() || argument.isBool()) {
        text << " " << argument;
      }
    }
    if (operation->generator.defined()) {
      const at::Tensor state = operation->generator.get_state();
      text.write(static_cast<const char*>(state.const_data_ptr()), static_cast<std::streamsize>(state.nbytes()));
    }
  }
  return text.str();
}

} // namespace fsdp::engine
