#include "optim/flat_shards.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include <ATen/ops/cat.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <fsdp/sharded_tensor.h>

namespace fsdp::optim {

namespace {

const Label kLabel{"LBFGS", ""};

double reduced(double value, ReduceOp op, double divide_by, Group& group, c10::Device device) {
  if (group.size() == 1) {
    return value;
  }
  const auto tensor = at::full({1}, value, at::TensorOptions().dtype(at::kDouble).device(device));
  group.all_reduce(tensor, op, divide_by, kLabel)->wait();
  return tensor.item<double>();
}

at::Tensor flat(const at::Tensor& tensor) {
  return (tensor.layout() == at::kStrided ? tensor : tensor.to_dense()).reshape({-1});
}

} // namespace

FlatShards::FlatShards(const std::vector<at::Tensor>& parameters)
    : device_(parameters.empty() ? c10::Device(at::kCPU) : parameters[0].device()) {
  std::unordered_set<const void*> seen;
  size_t most_ranks = 0;
  for (const at::Tensor& parameter : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    Family& family = family_for(parameter);
    family.numel += parameter.numel();
    family.parameters.push_back(parameter);
    if (!is_sharded(parameter)) {
      continue;
    }
    if (const Mesh mesh = sharded(parameter).mesh; static_cast<size_t>(mesh.numel()) > most_ranks) {
      most_ranks = static_cast<size_t>(mesh.numel());
      device_ = mesh.device();
      all_ranks_.clear();
      for (int dim = 0; dim < mesh.ndim(); ++dim) {
        all_ranks_.push_back(mesh.group(dim));
      }
    }
  }
}

FlatShards::Family& FlatShards::family_for(const at::Tensor& parameter) {
  Family wanted{.cut_over = {}, .device = parameter.device()};
  if (is_sharded(parameter)) {
    const ShardedTensor tensor = sharded(parameter);
    wanted.device = tensor.mesh.device();
    for (size_t dim = 0; dim < tensor.placements.size(); ++dim) {
      if (!tensor.placements[dim].is_replicate()) {
        wanted.cut_over.push_back(tensor.mesh.group(static_cast<int>(dim)));
      }
    }
  }
  for (Family& family : families_) {
    if (family.cut_over == wanted.cut_over) {
      return family;
    }
  }
  return families_.emplace_back(std::move(wanted));
}

void FlatShards::for_each(
    const at::Tensor& vector, const std::function<void(const at::Tensor&, const at::Tensor&)>& act) const {
  int64_t begin = 0;
  for (const Family& family : families_) {
    for (const at::Tensor& parameter : family.parameters) {
      act(parameter, vector.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
      begin += parameter.numel();
    }
  }
}

at::Tensor FlatShards::gradients() const {
  std::vector<at::Tensor> parts;
  for (const Family& family : families_) {
    for (const at::Tensor& parameter : family.parameters) {
      const at::Tensor gradient = is_sharded(parameter) ? sharded(parameter).grad() : parameter.grad();
      parts.push_back(flat(gradient.defined() ? gradient : at::zeros_like(parameter)));
    }
  }
  return at::cat(parts);
}

at::Tensor FlatShards::values() const {
  std::vector<at::Tensor> parts;
  for (const Family& family : families_) {
    for (const at::Tensor& parameter : family.parameters) {
      parts.push_back(flat(parameter.detach()));
    }
  }
  return at::cat(parts);
}

void FlatShards::set_values(const at::Tensor& values) const {
  for_each(values, [](const at::Tensor& parameter, const at::Tensor& part) { parameter.copy_(part); });
}

void FlatShards::move(const at::Tensor& direction, double step) const {
  for_each(direction, [step](const at::Tensor& parameter, const at::Tensor& part) { parameter.add_(part, step); });
}

// `part`: of one family's elements on this rank, given where they begin and how many there are.
template <typename Part>
double FlatShards::combine(ReduceOp op, const Part& part) const {
  double total = 0;
  int64_t begin = 0;
  for (const Family& family : families_) {
    double value = family.numel == 0 ? 0 : part(begin, family.numel);
    for (const auto& group : family.cut_over) {
      value = reduced(value, op, /*divide_by=*/1, *group, family.device);
    }
    total = op == ReduceOp::kMax ? std::max(total, value) : total + value;
    begin += family.numel;
  }
  return total;
}

double FlatShards::dot(const at::Tensor& a, const at::Tensor& b) const {
  return combine(ReduceOp::kSum, [&](int64_t begin, int64_t numel) {
    return at::dot(a.narrow(0, begin, numel), b.narrow(0, begin, numel)).item<double>();
  });
}

double FlatShards::largest(const at::Tensor& vector) const {
  return combine(ReduceOp::kMax, [&](int64_t begin, int64_t numel) {
    const double value = vector.narrow(0, begin, numel).abs().max().item<double>();
    return std::isnan(value) ? std::numeric_limits<double>::infinity() : value; // which a maximum might pass over
  });
}

double FlatShards::sum_of_absolutes(const at::Tensor& vector) const {
  return combine(ReduceOp::kSum, [&](int64_t begin, int64_t numel) {
    return vector.narrow(0, begin, numel).abs().sum().item<double>();
  });
}

double FlatShards::average_over_ranks(double value) const {
  for (const auto& group : all_ranks_) {
    value = reduced(value, ReduceOp::kSum, group->size(), *group, device_);
  }
  return value;
}

} // namespace fsdp::optim
