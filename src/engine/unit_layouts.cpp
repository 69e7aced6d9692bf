// How a unit's parameters are cut: each along a dimension, or all as one flat parameter.

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/flat_bucket.h"
#include "engine/unit.h"
#include "layout/param_layout.h"

namespace fsdp::engine {

namespace {

std::vector<int64_t> strides_of(const ParamSpec& spec) {
  const auto& tensor = spec.tensor;
  FSDP_CHECK(
      tensor.layout() == c10::kStrided,
      "[fully_shard] '{}' is a {} tensor, which cannot be cut into shards: make it dense with to_dense(), or put it "
      "into ignored_params",
      spec.name,
      tensor.layout());
  const bool dense = layout::is_dense(tensor.sizes(), tensor.strides());
  return dense ? tensor.strides().vec() : layout::contiguous_strides(tensor.sizes());
}

layout::ParamLayout cut_along_dimension(const ParamSpec& spec, int ranks) {
  const auto& tensor = spec.tensor;
  auto strides = strides_of(spec);
  const int64_t ndim = tensor.dim();
  int64_t dim = spec.placement.dim;
  FSDP_CHECK(
      ndim == 0 ? (dim == 0 || dim == -1) : (dim >= -ndim && dim < ndim),
      "[fully_shard] shard_placement_fn gave dimension {} for '{}', which has {} dimensions: give one from 0 on, or "
      "from -1 back",
      dim,
      spec.name,
      ndim);
  dim = dim < 0 && ndim > 0 ? dim + ndim : std::max<int64_t>(dim, 0);
  return {tensor.sizes().vec(), std::move(strides), dim, ranks};
}

// Of the dtype in which they are computed with, which is not the stored one in mixed precision.
int64_t alignment_in_elements(const UnitSpec& spec) {
  if (spec.params.empty()) {
    return 1;
  }
  const auto dtype = spec.precision.param_dtype.value_or(spec.params.front().tensor.scalar_type());
  return std::max<int64_t>(1, spec.flat->alignment / static_cast<int64_t>(c10::elementSize(dtype)));
}

std::vector<layout::ParamLayout> parts_of_flat(const UnitSpec& spec, int ranks) {
  std::vector<int64_t> numels;
  std::vector<NamedDtype> dtypes;
  for (const auto& param : spec.params) {
    numels.push_back(param.tensor.numel());
    dtypes.push_back({param.name, param.tensor.scalar_type()});
  }
  check_one_dtype(dtypes);
  const auto cuts = layout::flat_cuts(numels, ranks, alignment_in_elements(spec));
  std::vector<layout::ParamLayout> parts;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const auto& param = spec.params[i];
    parts.emplace_back(param.tensor.sizes().vec(), strides_of(param), cuts[i], ranks);
  }
  return parts;
}

} // namespace

std::vector<layout::ParamLayout> Unit::layouts_of_params() {
  if (spec_.flat) {
    return parts_of_flat(spec_, spec_.mesh.group(spec_.mesh.ndim() - 1)->size());
  }
  std::vector<layout::ParamLayout> layouts;
  for (const auto& param : spec_.params) {
    layouts.push_back(cut_along_dimension(param, bucket_for(param).shard_group().size()));
  }
  return layouts;
}

} // namespace fsdp::engine
