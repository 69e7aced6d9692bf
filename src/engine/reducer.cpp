#include "engine/reducer.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "base/stream.h"
#include "base/tracing.h"
#include "base/view_into.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// The gradients of one bucket that are reduced in one dtype.
struct Reducer::Reduction {
  Unit* unit; // not kept alive by what is in flight: it goes with its model, also when a step broke off
  Bucket* bucket;
  std::vector<Param*> params;
  at::Tensor flat; // this rank's slices of the sums, one after another
  std::vector<at::Tensor> slices; // views of it
  std::vector<at::Tensor>
      wholes; // on devices with streams: not freed, hence not reused by backward, before they were read
  std::unique_ptr<Work> work;
  int64_t bytes = 0; // of the whole gradients
  // As the unit said when the reduction began: users may have said something else by the time it ends.
  bool all_reduces;
  double divide_by;
};

namespace {

// Slices start where vector instructions like it, as torch's own allocations do.
int64_t aligned(int64_t numel, c10::ScalarType dtype) {
  const int64_t per_line = 64 / static_cast<int64_t>(c10::elementSize(dtype));
  return (numel + per_line - 1) / per_line * per_line;
}

// The gradient as the ranks' slices, one after another, of any shape.
at::Tensor as_slices(const Param& param, const at::Tensor& gradient) {
  if (param.layout().in_place() && gradient.is_contiguous()) {
    return gradient;
  }
  return param.layout().in_place() ? view_into(gradient, gradient.scalar_type(), gradient.numel())
                                   : param.layout().pack(gradient);
}

at::Tensor take_gradient(Param& param, c10::ScalarType dtype, c10::Device device) {
  at::Tensor gradient = std::exchange(param.gradient, {});
  if (!gradient.defined()) {
    return at::zeros({param.layout().numel()}, at::TensorOptions().dtype(dtype).device(device));
  }
  return as_slices(param, gradient.scalar_type() == dtype ? gradient : gradient.to(dtype));
}

double divisor(const Unit& unit, const Bucket& bucket) {
  const int replicas = bucket.replicate_group() != nullptr ? bucket.replicate_group()->size() : 1;
  return unit.policy.divide_factor.value_or(static_cast<double>(bucket.shard_group().size()) * replicas);
}

// Half precision overflows if sums are divided only at the very end.
bool divides_early(c10::ScalarType dtype) {
  return dtype == c10::kHalf;
}

// On a stream of its own, if one was given: after the reduction, and before the shards get their gradients.
void run_all_reduce_hook(const Unit& unit, std::vector<at::Tensor>& slices) {
  const auto& hook = unit.policy.all_reduce_hook;
  if (!hook) {
    return;
  }
  UserScope scope;
  const Stream compute = current_stream(unit.device());
  const Stream stream = unit.policy.all_reduce_hook_stream.value_or(compute);
  wait_stream(stream, compute);
  {
    StreamGuard on_stream(stream);
    for (auto& slice : slices) {
      hook(slice);
    }
  }
  wait_stream(compute, stream);
}

} // namespace

Reducer::Reducer() = default;
Reducer::~Reducer() = default;

void Reducer::submit(Unit& unit) {
  for (const auto& bucket : unit.buckets()) {
    std::vector<c10::ScalarType> dtypes;
    for (const Param* param : bucket->params()) {
      const auto dtype = unit.reduce_dtype_of(*param);
      if (param->takes_part_in_reduction() && std::find(dtypes.begin(), dtypes.end(), dtype) == dtypes.end()) {
        dtypes.push_back(dtype);
      }
    }
    for (const auto dtype : dtypes) {
      submit(unit, *bucket, dtype);
    }
  }
}

void Reducer::submit(Unit& unit, Bucket& bucket, c10::ScalarType dtype) {
  progress();
  while (in_flight() >= max_in_flight_) {
    finish_oldest();
  }
  const tracing::Span span("start reduction", unit.display_name());
  auto reduction = std::make_unique<Reduction>();
  reduction->unit = &unit;
  reduction->bucket = &bucket;
  reduction->all_reduces = unit.policy.requires_all_reduce;
  reduction->divide_by = divisor(unit, bucket);
  Runtime& runtime = unit.runtime();
  runtime.order_reduce();
  StreamGuard on_stream(runtime.reduce_stream());
  ReduceScatter args;
  for (auto* tensors : {&args.wholes, &args.slices}) {
    tensors->reserve(bucket.params().size());
  }
  int64_t numel = 0;
  const bool alone = bucket.reduce_group->size() == 1;
  for (Param* param : bucket.params()) {
    if (!param->takes_part_in_reduction() || unit.reduce_dtype_of(*param) != dtype) {
      continue;
    }
    reduction->params.push_back(param);
    if (has_streams(unit.device())) {
      reduction->wholes.push_back(param->gradient);
    }
    args.wholes.push_back(take_gradient(*param, dtype, unit.device()));
    args.chunks.push_back(param->layout().chunk());
    reduction->bytes += static_cast<int64_t>(args.wholes.back().nbytes());
    numel += aligned(param->layout().length(param->rank()), dtype);
  }
  if (!alone) {
    reduction->flat = at::empty({numel}, at::TensorOptions().dtype(dtype).device(unit.device()));
  }
  int64_t offset = 0;
  for (size_t i = 0; i < reduction->params.size(); ++i) {
    const Param& param = *reduction->params[i];
    const int64_t length = param.layout().length(param.rank());
    // Alone, the whole gradient is the slice: nothing is copied.
    args.slices.push_back(view_into(alone ? args.wholes[i] : reduction->flat, dtype, length, alone ? 0 : offset));
    offset += aligned(length, dtype);
  }
  const bool all_reduced_later = bucket.replicate_group() != nullptr;
  args.divide_by = all_reduced_later && !divides_early(dtype) ? 1 : reduction->divide_by;
  reduction->slices = args.slices;
  if (has_streams(unit.device())) {
    reduction->wholes.insert(reduction->wholes.end(), args.wholes.begin(), args.wholes.end());
  }
  reduction->work = bucket.reduce_group->reduce_scatter(std::move(args), unit.label("reduce gradients"));
  running_.push_back(std::move(reduction));
  runtime.unit_changed(unit, EventKind::kReduce);
}

void Reducer::progress() {
  if (!running_.empty() && running_.front()->work) {
    running_.front()->work->done();
  }
}

void Reducer::finish_oldest() {
  auto oldest = std::move(running_.front());
  running_.pop_front();
  const tracing::Span span("finish reduction", oldest->unit->display_name());
  oldest->work->wait();
  oldest->work.reset();
  complete(*oldest);
  oldest->unit->runtime().unit_changed(*oldest->unit, EventKind::kReduced);
}

void Reducer::finish() {
  while (!running_.empty()) {
    finish_oldest();
  }
}

void Reducer::abandon() {
  running_.clear();
}

void Reducer::forget(const Unit& unit) {
  std::erase_if(running_, [&](const auto& reduction) { return reduction->unit == &unit; });
}

int64_t Reducer::bytes_in_flight() const {
  int64_t total = 0;
  for (const auto& reduction : running_) {
    total += reduction->bytes;
  }
  return total;
}

void Reducer::complete(Reduction& reduction) {
  Unit& unit = *reduction.unit;
  Group* replicas = reduction.bucket->replicate_group();
  if (replicas != nullptr) {
    for (size_t i = 0; i < reduction.params.size(); ++i) {
      auto& partial = reduction.params[i]->partial;
      if (partial.defined()) {
        reduction.slices[i].add_(std::exchange(partial, {}));
      }
      if (!reduction.all_reduces) {
        partial = reduction.slices[i];
      }
    }
    if (!reduction.all_reduces) {
      return;
    }
    const double divide_by = divides_early(reduction.slices[0].scalar_type()) ? 1 : reduction.divide_by;
    const auto tensors = reduction.flat.defined() ? std::vector<at::Tensor>{reduction.flat} : reduction.slices;
    for (const auto& tensor : tensors) {
      replicas->all_reduce(tensor, ReduceOp::kSum, divide_by, unit.label("all-reduce gradients"))->wait();
    }
  }
  run_all_reduce_hook(unit, reduction.slices);
  for (size_t i = 0; i < reduction.params.size(); ++i) {
    reduction.params[i]->give_shard_gradient(reduction.slices[i]);
  }
}

} // namespace fsdp::engine
