#pragma once

#include <functional>
#include <memory>

#include <fsdp/group.h>

namespace fsdp {

/// The group, but gathers go through `all_gather(output, input, group)`: flat, equally long inputs of all ranks, one
/// after another.
std::shared_ptr<Group> with_all_gather(
    std::shared_ptr<Group> group, std::function<void(at::Tensor&, const at::Tensor&, Group&)> all_gather);

/// The group, but gradients go through `reduce_scatter(output, input, group)`: this rank's part of the sum of flat
/// inputs.
std::shared_ptr<Group> with_reduce_scatter(
    std::shared_ptr<Group> group, std::function<void(at::Tensor&, const at::Tensor&, Group&)> reduce_scatter);

} // namespace fsdp
