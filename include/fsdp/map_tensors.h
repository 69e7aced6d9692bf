#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>

/// The tensors in what functions are given and return: in optionals, vectors, pairs and tuples too.
namespace fsdp::detail {

template <typename Value, typename Convert>
Value map_tensors(const Value& value, const Convert& convert);

struct MapTensors {
  template <typename Item, typename Convert>
  static std::vector<Item> apply(const std::vector<Item>& items, const Convert& convert) {
    std::vector<Item> result;
    for (const auto& item : items) {
      result.push_back(map_tensors<Item>(item, convert));
    }
    return result;
  }
  template <typename Item, typename Convert>
  static std::optional<Item> apply(const std::optional<Item>& item, const Convert& convert) {
    return item ? std::optional<Item>(map_tensors(*item, convert)) : std::nullopt;
  }
  template <typename First, typename Second, typename Convert>
  static std::pair<First, Second> apply(const std::pair<First, Second>& pair, const Convert& convert) {
    auto first = map_tensors(pair.first, convert); // in this order
    return {std::move(first), map_tensors(pair.second, convert)};
  }
  template <typename... Items, typename Convert>
  static std::tuple<Items...> apply(const std::tuple<Items...>& items, const Convert& convert) {
    return std::apply( // braces: in this order
        [&](const auto&... item) { return std::tuple<Items...>{map_tensors(item, convert)...}; },
        items);
  }
  template <typename Value, typename Convert>
  static Value apply(const Value& value, const Convert&) {
    return value;
  }
};

/// A copy in which each tensor is what `convert` makes of it, from the first to the last; anything else is as it is.
template <typename Value, typename Convert>
Value map_tensors(const Value& value, const Convert& convert) {
  if constexpr (std::is_same_v<Value, at::Tensor>) {
    return convert(value);
  } else {
    return MapTensors::apply(value, convert);
  }
}

template <typename Value>
std::vector<at::Tensor> tensors_in(const Value& value) {
  std::vector<at::Tensor> tensors;
  map_tensors(value, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
  return tensors;
}

/// A copy with these tensors in the place of its own; undefined ones where there are no more.
template <typename Value>
Value with_tensors(const Value& value, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  return map_tensors(value, [&](const at::Tensor&) { return next < tensors.size() ? tensors[next++] : at::Tensor(); });
}

/// Whether `map_tensors` comes to all tensors that a value of this type may hold, and a copy of it is one.
template <typename Value>
inline constexpr bool kHasKnownTensors =
    std::is_arithmetic_v<Value> || std::is_enum_v<Value> || std::is_same_v<Value, at::Tensor> ||
    std::is_same_v<Value, std::string> || std::is_same_v<Value, c10::Scalar> || std::is_same_v<Value, c10::Device> ||
    std::is_same_v<Value, std::nullopt_t>;
template <typename Item>
inline constexpr bool kHasKnownTensors<std::vector<Item>> = kHasKnownTensors<Item>;
template <typename Item>
inline constexpr bool kHasKnownTensors<std::optional<Item>> = kHasKnownTensors<Item>;
template <typename First, typename Second>
inline constexpr bool kHasKnownTensors<std::pair<First, Second>> = kHasKnownTensors<First>&& kHasKnownTensors<Second>;
template <typename... Items>
inline constexpr bool kHasKnownTensors<std::tuple<Items...>> = (kHasKnownTensors<Items> && ...);

} // namespace fsdp::detail
