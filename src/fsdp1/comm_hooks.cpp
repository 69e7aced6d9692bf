// Ways to reduce gradients.

#include "fsdp1/comm_hooks.h"

#include <utility>

#include "base/check.h"

namespace fsdp::comm_hooks {

namespace {

void check_group(const std::shared_ptr<Group>& group, const char* name) {
  FSDP_CHECK(group, "[{}] the group is null: give the one that the model is sharded over, fsdp::world() mostly", name);
}

// Half precision overflows if all is divided at the end, and loses digits if all is divided at the beginning.
double divisor_before(const Group& group) {
  double factor = 1;
  while (group.size() / factor > factor) {
    factor *= 2;
  }
  return factor;
}

// Over the whole gradient, or over this rank's part of it.
void average(const at::Tensor& gradient, at::Tensor& output, Group& group, const char* name) {
  const Label label{name, ""};
  const double before = divisor_before(group), after = group.size() / before;
  if (output.is_same(gradient)) {
    output.div_(before);
    group.all_reduce(output, ReduceOp::kSum, after, label)->wait();
    return;
  }
  gradient.div_(before);
  ReduceScatter args;
  args.wholes = {gradient};
  args.slices = {output};
  args.cuts = {{.numel = gradient.numel(), .chunk = output.numel()}};
  args.divide_by = after;
  group.reduce_scatter(std::move(args), label)->wait();
}

struct Compressed {
  std::shared_ptr<Group> group;
  c10::ScalarType dtype;
  const char* name;

  void operator()(const at::Tensor& gradient, at::Tensor& output) const {
    const at::Tensor low = gradient.to(dtype);
    if (output.is_same(gradient)) {
      at::Tensor reduced = low;
      average(low, reduced, *group, name);
      output.copy_(reduced);
      return;
    }
    at::Tensor part = output.to(dtype);
    average(low, part, *group, name);
    output.copy_(part);
  }
};

CommHook compressed(std::shared_ptr<Group> group, c10::ScalarType dtype, const char* name) {
  check_group(group, name);
  return Compressed{std::move(group), dtype, name};
}

} // namespace

CommHook allreduce_hook(std::shared_ptr<Group> group) {
  check_group(group, "allreduce_hook");
  return
      [group](const at::Tensor& gradient, at::Tensor& output) { average(gradient, output, *group, "allreduce_hook"); };
}

CommHook reduce_scatter_hook(std::shared_ptr<Group> group) {
  check_group(group, "reduce_scatter_hook");
  return [group](const at::Tensor& gradient, at::Tensor& output) {
    average(gradient, output, *group, "reduce_scatter_hook");
  };
}

CommHook fp16_compress_hook(std::shared_ptr<Group> group) {
  return compressed(std::move(group), c10::kHalf, "fp16_compress_hook");
}

CommHook bf16_compress_hook(std::shared_ptr<Group> group) {
  return compressed(std::move(group), c10::kBFloat16, "bf16_compress_hook");
}

bool compresses(const CommHook& hook) {
  return hook.target<Compressed>() != nullptr;
}

} // namespace fsdp::comm_hooks
