#pragma once

#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace fsdp::engine {

/// Calls `change` with each defined tensor of an operator's argument or result: itself, or those in its lists. It may
/// put another in its place; then a list is another one.
template <class Change>
void change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    at::Tensor tensor = value.toTensor();
    if (tensor.defined()) {
      change(tensor);
      value = std::move(tensor);
    }
  } else if (value.isList()) {
    const auto changed = value.toList().copy();
    for (size_t i = 0; i < changed.size(); ++i) {
      c10::IValue item = changed.get(i);
      if (!item.isTensor() && !item.isList() && !item.isNone()) {
        return; // a list of numbers
      }
      change_tensors(item, change);
      changed.set(i, std::move(item));
    }
    value = changed;
  }
}

} // namespace fsdp::engine
