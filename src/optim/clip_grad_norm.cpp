#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "optim/sum_of_squares.h"

namespace fsdp {
namespace {

// Gradients of one dtype on one device: what one foreach call takes.
using GradientLists = std::vector<std::vector<at::Tensor>>;

void add_to(GradientLists& lists, const at::Tensor& grad) {
  for (auto& list : lists) {
    if (list[0].scalar_type() == grad.scalar_type() && list[0].device() == grad.device()) {
      list.push_back(grad);
      return;
    }
  }
  lists.push_back({grad});
}

// Parameters whose squares (or other powers) are summed over the same groups of ranks. Exists on every rank, with or
// without gradients there: its ranks meet in one collective.
struct Family {
  std::optional<Mesh> mesh; ///< unset: plain tensors
  std::vector<bool> sharded; ///< per mesh dimension; the others hold equal values
  GradientLists gradients;

  bool holds(const ShardedTensor& tensor) const {
    if (!mesh || !(*mesh == tensor.mesh)) {
      return false;
    }
    for (size_t dim = 0; dim < sharded.size(); ++dim) {
      if (sharded[dim] == tensor.placements[dim].is_replicate()) {
        return false;
      }
    }
    return true;
  }
};

Family family_like(const ShardedTensor& tensor) {
  Family family{.mesh = tensor.mesh, .sharded = {}, .gradients = {}};
  for (const Placement& placement : tensor.placements) {
    family.sharded.push_back(!placement.is_replicate());
  }
  return family;
}

// Families in the order of their first parameter, which is the same on all ranks; plain parameters come first.
class Families {
 public:
  Families() : families_(1) {}

  void add(const at::Tensor& param) {
    if (is_sharded(param)) {
      const ShardedTensor tensor = sharded(param);
      add_gradient(tensor.grad(), family_of(tensor));
    } else {
      add_gradient(param.grad(), families_[0]);
    }
  }

  const std::vector<Family>& all() const {
    return families_;
  }

 private:
  static void add_gradient(const at::Tensor& grad, Family& family) {
    if (!grad.defined() || grad.numel() == 0) {
      return;
    }
    FSDP_CHECK(
        grad.layout() == at::kStrided,
        "[clip_grad_norm_] expected dense gradients, got a {} one. Build the Embedding with sparse(false), or leave "
        "its parameter out.",
        grad.layout());
    add_to(family.gradients, grad);
  }

  Family& family_of(const ShardedTensor& tensor) {
    for (Family& family : families_) {
      if (family.holds(tensor)) {
        return family;
      }
    }
    return families_.emplace_back(family_like(tensor));
  }

  std::vector<Family> families_;
};

Families families_of(const std::vector<at::Tensor>& parameters) {
  Families families;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& param : parameters) {
    // A weight that modules share is listed by each of them.
    if (seen.insert(param.unsafeGetTensorImpl()).second) {
      families.add(param);
    }
  }
  return families;
}

// How norms of parts become the norm of the whole: as sums of p-th powers, or as maxima. All of it in float64.
class Norm {
 public:
  explicit Norm(double p) : p_(p) {
    FSDP_CHECK(p > 0, "[clip_grad_norm_] expected a norm_type above 0 (1, 2, infinity, ...), got {}", p);
  }

  // This rank's part: two numbers, the sum or maximum, and whether a maximum passed over something that is not a number
  // (reductions by maximum may drop it). Adding in float32 would give a whole tensor and its slices sums that differ in
  // the seventh digit; training with the one and with the other would drift apart.
  at::Tensor part(const GradientLists& lists, c10::Device device) const {
    std::vector<at::Tensor> powers{at::zeros({1}, at::device(device).dtype(at::kDouble))};
    for (const auto& list : lists) {
      powers.push_back(powers_of(list).to(device));
    }
    const at::Tensor all = at::cat(powers);
    if (!is_max()) {
      const at::Tensor sum = all.sum();
      return at::stack({sum, at::zeros_like(sum)});
    }
    const at::Tensor nan = at::isnan(all);
    return at::stack({at::where(nan, 0.0, all).max(), nan.any().to(at::kDouble)});
  }

  at::Tensor sum_over(at::Tensor part, const Family& family) const {
    for (size_t dim = 0; dim < family.sharded.size(); ++dim) {
      const auto& group = family.mesh->group(static_cast<int>(dim));
      if (family.sharded[dim] && group->size() > 1) {
        const ReduceOp op = is_max() ? ReduceOp::kMax : ReduceOp::kSum;
        group->all_reduce(part, op, /*divide_by=*/1, Label{"clip_grad_norm_", ""})->wait();
      }
    }
    return part;
  }

  at::Tensor total(const std::vector<at::Tensor>& parts) const {
    const at::Tensor all = at::stack(parts);
    const at::Tensor value = is_max() ? all.select(1, 0).max() : all.select(1, 0).sum().pow(1 / p_);
    const at::Tensor nan = all.select(1, 1).sum().gt(0);
    return at::where(nan, std::numeric_limits<double>::quiet_NaN(), value);
  }

 private:
  bool is_max() const {
    return std::isinf(p_);
  }

  // Of each gradient, the sum of p-th powers or the maximum.
  at::Tensor powers_of(const std::vector<at::Tensor>& gradients) const {
    if (p_ == 2 && std::all_of(gradients.begin(), gradients.end(), optim::has_sum_of_squares)) {
      std::vector<double> sums(gradients.size());
      std::transform(gradients.begin(), gradients.end(), sums.begin(), optim::sum_of_squares);
      return at::tensor(sums, at::kDouble);
    }
    // A maximum is the same in every dtype, and so found in the gradients' own; complex ones' norms are real.
    const auto sum_dtype = gradients[0].is_complex() ? at::kComplexDouble : at::kDouble;
    const auto dtype = is_max() ? std::optional<at::ScalarType>() : sum_dtype;
    const at::Tensor norms = at::stack(at::_foreach_norm(gradients, p_, dtype)).to(at::kDouble);
    return is_max() ? norms : norms.pow(p_);
  }

  double p_;
};

c10::Device device_of(const std::vector<Family>& families) {
  for (const Family& family : families) {
    if (family.mesh) {
      return family.mesh->device();
    }
  }
  return families[0].gradients.empty() ? c10::Device(at::kCPU) : families[0].gradients[0][0].device();
}

c10::ScalarType result_dtype(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& param : parameters) {
    if (c10::toRealValueType(param.scalar_type()) == at::kDouble) {
      return at::kDouble;
    }
  }
  return at::kFloat;
}

at::Tensor total_norm(const std::vector<Family>& families, const Norm& norm, c10::Device device) {
  std::vector<at::Tensor> parts;
  for (const Family& family : families) {
    parts.push_back(norm.sum_over(norm.part(family.gradients, device), family));
  }
  return norm.total(parts);
}

void scale(const GradientLists& lists, const at::Tensor& coefficient) {
  for (const auto& list : lists) {
    if (!coefficient.is_cpu()) {
      at::_foreach_mul_(list, coefficient.to(list[0].device()));
    } else if (const double factor = coefficient.item<double>(); factor != 1) {
      at::_foreach_mul_(list, factor);
    }
  }
}

} // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, const ClipOptions& options) {
  at::NoGradGuard no_grad;
  const Norm norm(options.norm_type);
  const Families families = families_of(parameters);
  const at::Tensor total = total_norm(families.all(), norm, device_of(families.all())).to(result_dtype(parameters));
  FSDP_CHECK(
      !options.error_if_nonfinite || std::isfinite(total.item<double>()),
      "[clip_grad_norm_] expected finite gradients, but their norm of order {} is {}. They were left as they are. To "
      "scale them anyway, set error_if_nonfinite = false.",
      options.norm_type,
      total.item<double>());
  const at::Tensor coefficient = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  for (const Family& family : families.all()) {
    scale(family.gradients, coefficient);
  }
  return total;
}

at::Tensor clip_grad_norm_(ConstModuleRef module, double max_norm, const ClipOptions& options) {
  return clip_grad_norm_(parameters(module.for_operation("clip_grad_norm_")), max_norm, options);
}

} // namespace fsdp
