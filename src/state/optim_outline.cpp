#include "state/optim_outline.h"

#include <algorithm>
#include <unordered_set>

#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "base/check.h"

namespace fsdp::state {

namespace {

using c10::IValue;
using Named = std::map<std::string, IValue>;
using ParamState = OptimStateDict::ParamState;
using ParamGroup = OptimStateDict::ParamGroup;

IValue tuple(std::vector<IValue> elements) {
  return c10::ivalue::Tuple::create(std::move(elements));
}

const auto& elements_of(const IValue& tuple) {
  return tuple.toTupleRef().elements();
}

IValue encode(const Named& values) {
  std::vector<IValue> elements;
  for (const auto& [name, value] : values) {
    elements.push_back(tuple({name, value.isTensor() ? IValue(value.toTensor().item()) : value}));
  }
  return tuple(std::move(elements));
}

Named decode_named(const IValue& encoded) {
  Named values;
  for (const auto& pair : elements_of(encoded)) {
    values[elements_of(pair)[0].toStringRef()] = elements_of(pair)[1];
  }
  return values;
}

IValue encode(const at::Tensor& tensor) {
  std::vector<IValue> sizes(tensor.sizes().begin(), tensor.sizes().end());
  std::vector<IValue> strides(tensor.strides().begin(), tensor.strides().end());
  return tuple({static_cast<int64_t>(tensor.scalar_type()), tuple(std::move(sizes)), tuple(std::move(strides))});
}

std::vector<int64_t> decode_numbers(const IValue& encoded) {
  std::vector<int64_t> numbers;
  for (const auto& number : elements_of(encoded)) {
    numbers.push_back(number.toInt());
  }
  return numbers;
}

at::Tensor decode_tensor(const IValue& encoded) {
  const auto& [dtype, sizes, strides] =
      std::tie(elements_of(encoded)[0], elements_of(encoded)[1], elements_of(encoded)[2]);
  const auto options = at::TensorOptions().dtype(static_cast<c10::ScalarType>(dtype.toInt())).device(c10::kMeta);
  return at::empty_strided(decode_numbers(sizes), decode_numbers(strides), options);
}

IValue encode(const ParamState& state) {
  Named tensors;
  for (const auto& [name, tensor] : state.tensors) {
    if (tensor.defined()) {
      tensors[name] = encode(tensor);
    }
  }
  return tuple({encode(tensors), encode(state.scalars)});
}

ParamState decode_state(const IValue& encoded) {
  ParamState state{.scalars = decode_named(elements_of(encoded)[1])};
  for (const auto& [name, tensor] : decode_named(elements_of(encoded)[0])) {
    state.tensors[name] = decode_tensor(tensor);
  }
  return state;
}

IValue encode(const ParamGroup& group) {
  return tuple({tuple({group.params.begin(), group.params.end()}), encode(group.options)});
}

ParamGroup decode_group(const IValue& encoded) {
  ParamGroup group{.options = decode_named(elements_of(encoded)[1])};
  for (const auto& name : elements_of(elements_of(encoded)[0])) {
    group.params.push_back(name.toStringRef());
  }
  return group;
}

bool has_elements(const ParamState& state) {
  return std::any_of(
      state.tensors.begin(), state.tensors.end(), [](const auto& item) { return item.second.numel() > 0; });
}

/// One parameter's state, as far as it is known.
struct Merged {
  ParamState state{};
  bool settled = false; ///< the scalars are those of a rank that has elements
};

void add_tensors(Merged& merged, const ParamState& more, const std::string& name, const char* operation) {
  for (const auto& [key, tensor] : more.tensors) {
    const auto& known = merged.state.tensors.emplace(key, tensor).first->second;
    FSDP_CHECK(
        known.scalar_type() == tensor.scalar_type(),
        "[{}] '{}' of '{}' is {} on one rank and {} on another: give all ranks the same optimizer",
        operation,
        key,
        name,
        known.scalar_type(),
        tensor.scalar_type());
  }
}

void add_scalars(Merged& merged, const ParamState& more, const std::string& name, const char* operation) {
  if (!has_elements(more)) {
    merged.state.scalars.insert(more.scalars.begin(), more.scalars.end());
    return;
  }
  FSDP_CHECK(
      !merged.settled || encode(merged.state.scalars) == encode(more.scalars),
      "[{}] the ranks have updated '{}' differently often: {} on one, {} on another. Let all ranks step alike",
      operation,
      name,
      encode(merged.state.scalars),
      encode(more.scalars));
  merged.state.scalars = more.scalars;
  merged.settled = true;
}

} // namespace

std::string encode(const OptimStateDict& dict) {
  std::vector<IValue> states, groups;
  for (const auto& item : dict.state) {
    states.push_back(tuple({item.key(), encode(item.value())}));
  }
  for (const auto& group : dict.param_groups) {
    groups.push_back(encode(group));
  }
  const auto bytes = torch::jit::pickle(tuple({tuple(std::move(states)), tuple(std::move(groups))}));
  return {bytes.begin(), bytes.end()};
}

OptimStateDict decode(const std::string& text) {
  const IValue encoded = torch::jit::unpickle(text.data(), text.size());
  OptimStateDict dict;
  for (const auto& item : elements_of(elements_of(encoded)[0])) {
    dict.state.insert(elements_of(item)[0].toStringRef(), decode_state(elements_of(item)[1]));
  }
  for (const auto& group : elements_of(elements_of(encoded)[1])) {
    dict.param_groups.push_back(decode_group(group));
  }
  return dict;
}

OptimStateDict merge(const std::vector<OptimStateDict>& of_ranks, const char* operation) {
  torch::OrderedDict<std::string, Merged> merged;
  for (const auto& of_rank : of_ranks) {
    for (const auto& item : of_rank.state) {
      if (!merged.contains(item.key())) {
        merged.insert(item.key(), Merged());
      }
      add_tensors(merged[item.key()], item.value(), item.key(), operation);
      add_scalars(merged[item.key()], item.value(), item.key(), operation);
    }
  }
  OptimStateDict dict;
  for (auto& item : merged) {
    dict.state.insert(item.key(), std::move(item.value().state));
  }
  return dict;
}

} // namespace fsdp::state
