#include <fsdp/mesh.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/init.h>

#include "base/check.h"
#include "base/format.h"
#include "comm/c10d/factory.h"
#include "comm/world.h"

namespace fsdp {

struct Mesh::Impl {
  /// This rank's neighbours along a dimension, as ranks of `base`: first, first + stride, ...
  struct Line {
    int64_t first;
    int64_t stride;
    bool operator==(const Line&) const = default;
  };

  std::vector<int64_t> sizes;
  std::vector<std::string> names; ///< empty, or one for each dimension
  std::vector<std::shared_ptr<Group>> groups; ///< of this rank, one for each dimension
  c10::Device device = c10::kCPU;
  std::shared_ptr<Group> base; ///< whose ranks are arranged; null when the groups were given one by one
  std::vector<Line> lines; ///< with `base`, one for each dimension
};

namespace {

constexpr size_t kMaxDimensions = 8;
constexpr const char* kInitMesh = "init_device_mesh";

std::string shape(const std::vector<int64_t>& sizes) {
  return join(sizes, "x");
}

void check_names(const char* operation, const std::vector<std::string>& names, size_t dimensions) {
  FSDP_CHECK(
      names.empty() || names.size() == dimensions,
      "[{}] expected a name for each of {} dimensions or no names at all, got {} ({})",
      operation,
      dimensions,
      names.size(),
      join(names));
  const std::set<std::string> distinct(names.begin(), names.end());
  FSDP_CHECK(
      distinct.size() == names.size() && !distinct.contains(""),
      "[{}] expected distinct names of dimensions that are not empty, got {}",
      operation,
      join(names, "|"));
}

void check_sizes(const std::vector<int64_t>& sizes, int64_t world_size) {
  FSDP_CHECK(
      !sizes.empty() && sizes.size() <= kMaxDimensions,
      "[{}] expected 1 to {} dimensions, got {}",
      kInitMesh,
      kMaxDimensions,
      sizes.size());
  int64_t product = 1;
  for (const int64_t size : sizes) {
    FSDP_CHECK(size > 0, "[{}] expected positive sizes, got {}", kInitMesh, shape(sizes));
    product *= product <= world_size ? size : 1; // no product overflows
  }
  FSDP_CHECK(
      product == world_size,
      "[{}] expected sizes whose product is the number of ranks, {}, got {}; change the sizes or start another number "
      "of ranks",
      kInitMesh,
      world_size,
      shape(sizes));
}

c10::Device device_for(const std::string& text) {
  const c10::Device mine = device();
  const auto asked = find_device(text);
  FSDP_CHECK(
      asked && asked->type() == mine.type(),
      "[{}] expected the device that the job trains on, {}, got '{}'; pass that one, or choose another with "
      "fsdp::init({.device = ...})",
      kInitMesh,
      mine,
      text);
  return mine;
}

/// Product of the sizes after `dim`: how far apart neighbours along it are.
int64_t stride_of(const std::vector<int64_t>& sizes, size_t dim) {
  return std::accumulate(
      sizes.begin() + static_cast<std::ptrdiff_t>(dim) + 1, sizes.end(), int64_t{1}, std::multiplies<>());
}

Mesh::Impl::Line line_along(const std::vector<int64_t>& sizes, size_t dim, int rank) {
  const int64_t stride = stride_of(sizes, dim);
  const int64_t coordinate = rank / stride % sizes[dim];
  return {rank - coordinate * stride, stride};
}

std::shared_ptr<Group> group_along(
    const std::shared_ptr<Group>& base, int64_t size, int64_t first, const std::string& name) {
  if (size == base->size()) {
    return base;
  }
  return base->split(static_cast<int>(first), {.operation = "init device mesh", .unit = name});
}

Mesh make(Mesh::Impl impl) {
  return Mesh(std::make_shared<const Mesh::Impl>(std::move(impl)));
}

c10::Device device_of(const Group& group) {
  if (const auto device = c10d_device(group)) {
    return *device;
  }
  const World* world = current_world();
  return world ? world->device : c10::Device(c10::kCPU);
}

} // namespace

Mesh::Mesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Mesh Mesh::from_group(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::string name) {
  return from_group(Group::from(std::move(process_group)), std::move(name));
}

Mesh Mesh::from_group(std::shared_ptr<Group> group, std::string name) {
  return from_groups({std::move(group)}, name.empty() ? std::vector<std::string>() : std::vector{std::move(name)});
}

Mesh Mesh::from_groups(
    std::vector<std::shared_ptr<Group>> groups, std::vector<std::string> names, std::optional<c10::Device> device) {
  FSDP_CHECK(!groups.empty(), "[Mesh::from_groups] expected a group for each dimension, got none");
  check_names("Mesh::from_groups", names, groups.size());
  Impl impl;
  impl.names = std::move(names);
  impl.groups = std::move(groups);
  for (const auto& group : impl.groups) {
    FSDP_CHECK(group, "[Mesh::from_groups] expected a group for each dimension, got null");
    impl.sizes.push_back(group->size());
  }
  impl.device = device ? *device : device_of(*impl.groups.front());
  return make(std::move(impl));
}

int Mesh::ndim() const {
  return static_cast<int>(impl_->sizes.size());
}

const std::vector<int64_t>& Mesh::sizes() const {
  return impl_->sizes;
}

const std::vector<std::string>& Mesh::names() const {
  return impl_->names;
}

int64_t Mesh::numel() const {
  return std::accumulate(impl_->sizes.begin(), impl_->sizes.end(), int64_t{1}, std::multiplies<>());
}

c10::Device Mesh::device() const {
  return impl_->device;
}

const std::shared_ptr<Group>& Mesh::group(int dim) const {
  FSDP_CHECK(
      dim >= 0 && dim < ndim(), "[Mesh::group] expected a dimension of {}, 0 to {}, got {}", str(), ndim() - 1, dim);
  return impl_->groups[dim];
}

int Mesh::coordinate(int dim) const {
  return group(dim)->rank();
}

Mesh Mesh::operator[](const std::string& name) const {
  return (*this)[std::vector{name}];
}

Mesh Mesh::operator[](const std::vector<std::string>& names) const {
  FSDP_CHECK(!names.empty(), "[Mesh::operator[]] expected names of dimensions of {}, got none", str());
  Impl slice;
  slice.names = names;
  slice.device = impl_->device;
  slice.base = impl_->base;
  auto from = impl_->names.begin();
  for (const auto& name : names) {
    const auto found = std::find(from, impl_->names.end(), name);
    FSDP_CHECK(
        found != impl_->names.end(),
        "[Mesh::operator[]] expected names of dimensions of {}, each once and in its order, got {}",
        str(),
        join(names));
    const auto dim = found - impl_->names.begin();
    slice.sizes.push_back(impl_->sizes[dim]);
    slice.groups.push_back(impl_->groups[dim]);
    if (impl_->base) {
      slice.lines.push_back(impl_->lines[dim]);
    }
    from = found + 1;
  }
  return make(std::move(slice));
}

Mesh Mesh::operator[](std::initializer_list<std::string> names) const {
  return (*this)[std::vector<std::string>(names)];
}

bool Mesh::operator==(const Mesh& other) const {
  const Impl& a = *impl_;
  const Impl& b = *other.impl_;
  const auto same_group = [](const auto& one, const auto& other) { // a rank alone may have many of itself
    return one == other || (one->size() == 1 && other->size() == 1);
  };
  const bool same_groups = std::equal(a.groups.begin(), a.groups.end(), b.groups.begin(), b.groups.end(), same_group);
  const bool same_ranks = same_groups || (a.base && a.base == b.base && a.lines == b.lines);
  return same_ranks && a.sizes == b.sizes && a.names == b.names && a.device == b.device;
}

std::string Mesh::str() const {
  const std::string names = impl_->names.empty() ? "" : join(impl_->names, " x ") + ", ";
  return phrase("Mesh({}, {}{})", shape(impl_->sizes), names, impl_->device);
}

Mesh init_device_mesh(const std::string& device, std::vector<int64_t> sizes, std::vector<std::string> names) {
  const auto& all = world();
  check_sizes(sizes, all->size());
  check_names(kInitMesh, names, sizes.size());
  Mesh::Impl impl;
  impl.sizes = std::move(sizes);
  impl.names = std::move(names);
  impl.device = device_for(device);
  impl.base = all;
  for (size_t dim = 0; dim < impl.sizes.size(); ++dim) {
    const auto line = line_along(impl.sizes, dim, all->rank());
    const std::string name = impl.names.empty() ? std::to_string(dim) : impl.names[dim];
    impl.lines.push_back(line);
    impl.groups.push_back(group_along(all, impl.sizes[dim], line.first, name));
  }
  return make(std::move(impl));
}

Mesh default_mesh() {
  return Mesh::from_group(world());
}

} // namespace fsdp
