#include "engine/reducer.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "base/stream.h"
#include "base/tracing.h"
#include "base/view_into.h"
#include "engine/bucket.h"
#include "engine/flat_shard.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// The gradients of one bucket that are reduced in one dtype: packed and reduce-scattered on the reduce stream,
/// all-reduced (on hybrid meshes) on a stream of its own, delivered on the current one.
struct Reducer::Reduction {
  Unit* unit; // not kept alive by what is in flight: it goes with its model, also when a step broke off
  Bucket* bucket;
  std::vector<Param*> params;
  at::Tensor flat; // this rank's slices of the sums, one after another
  std::vector<at::Tensor> slices; // views of it
  std::unique_ptr<Work> work; // the collective that runs; null once its stream comes after it
  fsdp::Event scattered; // the end of the reduce-scatter, once its stream comes after it
  fsdp::Event reduced; // and of the all-reduce
  std::vector<at::Tensor>
      wholes; // on devices with streams: not freed, hence not reused by backward, before they were read
  std::vector<Stream> gradient_streams; // to which their memory belongs
  int64_t bytes = 0; // of the whole gradients
  bool scatters; // over ranks; else the slices are as large as the wholes
  bool has_scattered = false; // as far as the host has to do something for it
  bool holds_wholes = true; // or slices as large
  // As the unit said when the reduction began: users may have said something else by the time it ends.
  bool all_reduces;
  double divide_by;
  std::function<void(at::Tensor&)> hook;

  Group* replicas() const {
    return bucket->replicate_group();
  }
  bool is_reduced_twice() const {
    return scatters && replicas() != nullptr;
  }
  /// Users see all of `flat`.
  bool is_shown() const {
    return hook || unit->policy.all_reduce || bucket->flat_shard() != nullptr;
  }
  /// Where a parameter's slice begins in `flat`, which reaches to `end` so far, and grows. Slices start where vector
  /// instructions like it, as torch's own allocations do; what a hook is given has no gaps, and the same size on all
  /// ranks: full shards, as PyTorch's.
  int64_t make_room(const Param& param, c10::ScalarType dtype, int64_t& end) const {
    const Cut& cut = param.layout().cut();
    if (is_shown() && param.layout().is_part_of_flat()) {
      end = cut.chunk;
      return std::min(cut.offset(param.rank()), cut.chunk);
    }
    const int64_t per_line = 64 / static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t room = hook ? cut.chunk : (cut.length(param.rank()) + per_line - 1) / per_line * per_line;
    return std::exchange(end, end + room);
  }
  /// What shards are given, and of which parameters they are; the flat shard's, of the first.
  std::vector<std::pair<Param*, at::Tensor>> gradients() const {
    if (bucket->flat_shard() != nullptr) {
      return {{params.front(), flat}};
    }
    std::vector<std::pair<Param*, at::Tensor>> gradients;
    gradients.reserve(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      gradients.emplace_back(params[i], slices[i]);
    }
    return gradients;
  }
};

namespace {

// As the ranks' slices, one after another, of any shape. An operator is called only where something changes.
at::Tensor take_gradient(Param& param, c10::ScalarType dtype, c10::Device device) {
  at::Tensor gradient = std::exchange(param.gradient, {});
  if (!gradient.defined()) {
    return at::zeros({param.layout().numel()}, at::TensorOptions().dtype(dtype).device(device));
  }
  gradient = gradient.scalar_type() == dtype ? gradient : gradient.to(dtype);
  if (!param.layout().in_place()) {
    return param.layout().pack(gradient);
  }
  return gradient.is_contiguous() ? gradient : view_into(gradient, dtype, gradient.numel());
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
void run_hook(const Unit& unit, const std::function<void(at::Tensor&)>& hook, at::Tensor& gradients) {
  UserScope scope;
  const Stream compute = current_stream(unit.device());
  const Stream stream = unit.policy.all_reduce_hook_stream.value_or(compute);
  wait_stream(stream, compute);
  {
    StreamGuard on_stream(stream);
    hook(gradients);
  }
  wait_stream(compute, stream);
}

// In earlier backwards, with `requires_all_reduce` off: this rank's slice so far.
void put_off_or_add(Param& param, at::Tensor& slice, bool put_off) {
  if (param.partial.defined()) {
    slice.add_(std::exchange(param.partial, {}));
  }
  if (put_off) {
    param.partial = slice;
  }
}

// To page-locked memory copies need no wait each.
bool shards_are_pinned_on_host(const Unit& unit, const std::vector<Param*>& params) {
  return unit.offloaded() && has_streams(unit.device()) && std::any_of(params.begin(), params.end(), [](Param* param) {
           return param->shard().is_cpu() && param->shard().is_pinned();
         });
}

} // namespace

Reducer::Reducer() = default;
Reducer::~Reducer() = default;

void Reducer::submit(Unit& unit) {
  unit.gradient_on_stream(/*adds=*/false); // or those that it comes after, at the end of backward
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
  unit.gradient_streams.clear();
}

void Reducer::submit(Unit& unit, Bucket& bucket, c10::ScalarType dtype) {
  progress();
  make_room();
  const tracing::Span span("start reduction", unit.display_name());
  auto reduction = std::make_unique<Reduction>();
  reduction->unit = &unit;
  reduction->bucket = &bucket;
  reduction->scatters = bucket.reduce_group->size() > 1;
  reduction->all_reduces = unit.policy.requires_all_reduce;
  reduction->divide_by = divisor(unit, bucket);
  reduction->hook = unit.policy.all_reduce_hook;
  reduction->gradient_streams = unit.gradient_streams.streams();
  come_after_deliveries(unit);
  start_reduce_scatter(*reduction, dtype);
  // Where it may be queued without waiting for what comes before it.
  if (reduction->replicas() != nullptr && (has_streams(unit.device()) || !reduction->scatters)) {
    start_all_reduce(*reduction);
  }
  running_.push_back(std::move(reduction));
  unit.runtime().unit_changed(unit, EventKind::kReduce);
}

// Shards' gradients are cast, or added to others, where they were given; then their memory is the reduce stream's.
void Reducer::come_after_deliveries(const Unit& unit) {
  for (const Stream& stream : std::exchange(given_on_, {})) {
    if (!unit.gradient_streams.goes_on(stream)) { // which it comes after anyway
      wait_stream(unit.runtime().reduce_stream(), stream);
    }
  }
}

void Reducer::start_reduce_scatter(Reduction& reduction, c10::ScalarType dtype) {
  Unit& unit = *reduction.unit;
  Bucket& bucket = *reduction.bucket;
  const Stream stream = unit.runtime().reduce_stream();
  unit.gradient_streams.block(stream);
  StreamGuard on_stream(stream);
  ReduceScatter args;
  for (auto* tensors : {&args.wholes, &args.slices}) {
    tensors->reserve(bucket.params().size());
  }
  std::vector<int64_t> offsets;
  int64_t numel = 0, covered = 0;
  for (Param* param : bucket.params()) {
    if (!param->joins_reduction() || unit.reduce_dtype_of(*param) != dtype) {
      continue;
    }
    reduction.params.push_back(param);
    if (has_streams(unit.device())) {
      reduction.wholes.push_back(param->gradient);
    }
    args.wholes.push_back(take_gradient(*param, dtype, unit.device()));
    args.cuts.push_back(param->layout().cut());
    reduction.bytes += static_cast<int64_t>(args.wholes.back().nbytes());
    offsets.push_back(reduction.make_room(*param, dtype, numel));
    covered += param->layout().cut().length(param->rank());
  }
  // Alone, the whole gradient is the slice: nothing is copied, unless all slices go on as one, or to the host.
  const bool goes_on =
      reduction.replicas() != nullptr || reduction.is_shown() || (unit.offloaded() && has_streams(unit.device()));
  const bool in_place = !reduction.scatters && !goes_on;
  if (!in_place) {
    const auto options = at::TensorOptions().dtype(dtype).device(unit.device());
    const bool has_gaps = covered < numel && (reduction.is_shown() || reduction.replicas() != nullptr);
    reduction.flat = has_gaps ? at::zeros({numel}, options) : at::empty({numel}, options);
  }
  for (size_t i = 0; i < reduction.params.size(); ++i) {
    const Param& param = *reduction.params[i];
    const int64_t length = param.layout().cut().length(param.rank());
    args.slices.push_back(
        view_into(in_place ? args.wholes[i] : reduction.flat, dtype, length, in_place ? 0 : offsets[i]));
  }
  const bool all_reduced_later = reduction.replicas() != nullptr;
  args.divide_by = all_reduced_later && !divides_early(dtype) ? 1 : reduction.divide_by;
  reduction.slices = args.slices;
  if (has_streams(unit.device())) {
    reduction.wholes.insert(reduction.wholes.end(), args.wholes.begin(), args.wholes.end());
  }
  reduction.work = bucket.reduce_group->reduce_scatter(std::move(args), unit.label("reduce gradients"));
}

// On a device only the reduce stream waits.
void Reducer::end_reduce_scatter(Reduction& reduction) {
  const Stream stream = reduction.unit->runtime().reduce_stream();
  const StreamGuard on_stream(stream);
  reduction.work->wait();
  reduction.work.reset();
  reduction.scattered.record(stream);
  reduction.has_scattered = true;
}

void Reducer::start_all_reduce(Reduction& reduction) {
  Unit& unit = *reduction.unit;
  end_reduce_scatter(reduction);
  {
    const StreamGuard on_stream(unit.runtime().reduce_stream());
    for (size_t i = 0; i < reduction.params.size(); ++i) {
      put_off_or_add(*reduction.params[i], reduction.slices[i], /*put_off=*/!reduction.all_reduces);
    }
  }
  if (!reduction.all_reduces) {
    return;
  }
  const Stream stream = unit.runtime().all_reduce_stream();
  wait_stream(stream, unit.runtime().reduce_stream());
  const StreamGuard on_stream(stream);
  if (unit.policy.all_reduce) {
    UserScope scope;
    unit.policy.all_reduce(reduction.flat);
  } else {
    const double divide_by = divides_early(reduction.flat.scalar_type()) ? 1 : reduction.divide_by;
    reduction.work =
        reduction.replicas()->all_reduce(reduction.flat, ReduceOp::kSum, divide_by, unit.label("all-reduce gradients"));
  }
  if (has_streams(unit.device())) {
    if (reduction.work) {
      reduction.work->wait();
      reduction.work.reset();
    }
    reduction.reduced.record(stream);
  }
}

void Reducer::progress() {
  if (running_.empty()) {
    return;
  }
  // Groups have a queue each: of the two at work on a hybrid mesh, the oldest is in one and the newest in the other.
  for (auto* work : {running_.front()->work.get(), running_.size() > 1 ? running_.back()->work.get() : nullptr}) {
    if (work != nullptr) {
      work->done();
    }
  }
}

// [Note: order of all-reduces] An all-reduce across replicas is started and waited for where another reduction is
// submitted, or at the end of backward: moments in the program, which are the same on all ranks, as the collectives
// that it shares a communicator with may be (of other meshes' units, of the user). When its reduce-scatter happens to
// be done is not.
void Reducer::make_room() {
  const auto holds_wholes = [](const auto& reduction) { return reduction->holds_wholes; };
  while (std::count_if(running_.begin(), running_.end(), holds_wholes) >= max_in_flight_) {
    Reduction* oldest = std::find_if(running_.begin(), running_.end(), holds_wholes)->get();
    const bool goes_on = oldest->is_reduced_twice();
    if (goes_on) {
      give_up_wholes(*oldest);
    }
    while (!running_.empty() && running_.front().get() != oldest) { // a user's function may let go of its model
      finish_oldest();
    }
    if (!goes_on && !running_.empty()) {
      finish_oldest();
    }
  }
}

// The reduce-scatter has read them. What is left is one slice.
void Reducer::give_up_wholes(Reduction& reduction) {
  if (reduction.replicas() == nullptr) {
    end_reduce_scatter(reduction);
  } else if (!reduction.has_scattered) {
    start_all_reduce(reduction);
  }
  for (const Stream& stream : reduction.gradient_streams) {
    reduction.scattered.block(stream);
  }
  reduction.wholes.clear();
  reduction.bytes = 0;
  reduction.holds_wholes = false;
}

void Reducer::finish_oldest() {
  const auto oldest = std::move(running_.front());
  // Users' functions may let go of it. Where another thread just has, that waits for the runtime's lock.
  const auto keep_alive = oldest->unit->weak_from_this().lock();
  running_.pop_front();
  const tracing::Span span("finish reduction", oldest->unit->display_name());
  if (oldest->holds_wholes) {
    give_up_wholes(*oldest);
  }
  if (oldest->work) {
    oldest->work->wait();
  }
  if (oldest->all_reduces || oldest->replicas() == nullptr) {
    deliver(*oldest);
  }
  oldest->unit->runtime().unit_changed(*oldest->unit, EventKind::kReduced);
}

void Reducer::deliver(Reduction& reduction) {
  Unit& unit = *reduction.unit;
  const Stream here = current_stream(unit.device());
  reduction.scattered.block(here);
  reduction.reduced.block(here);
  if (reduction.hook) {
    run_hook(unit, reduction.hook, reduction.flat);
  }
  if (shards_are_pinned_on_host(unit, reduction.params)) {
    wait_stream(unit.runtime().reduce_stream(), here);
    start_copies(reduction);
    return;
  }
  for (const auto& [param, gradient] : reduction.gradients()) {
    deliver(*param, gradient);
  }
}

void Reducer::deliver(Param& param, at::Tensor gradient) {
  param.unit().runtime().gradient_delivered(param, gradient);
  deliveries_.push_back({&param, std::move(gradient)});
}

std::optional<Reducer::Delivery> Reducer::next_delivery() {
  while (!deliveries_.empty()) {
    const Arrived next = std::move(deliveries_.front());
    deliveries_.pop_front();
    if (auto unit = next.param->unit().weak_from_this().lock()) { // else it is about to be forgotten
      given_here(*unit);
      return Delivery{std::move(unit), next.param, next.gradient};
    }
  }
  return std::nullopt;
}

// On this thread, next.
void Reducer::given_here(const Unit& unit) {
  const Stream here = current_stream(unit.device());
  if (has_streams(unit.device()) && std::find(given_on_.begin(), given_on_.end(), here) == given_on_.end()) {
    given_on_.push_back(here);
  }
}

void Reducer::start_copies(const Reduction& reduction) {
  const StreamGuard on_stream(reduction.unit->runtime().reduce_stream());
  for (const auto& [param, gradient] : reduction.gradients()) {
    const auto dtype = reduction.unit->policy.keep_gradient_dtype ? gradient.scalar_type() : param->shard_dtype();
    const auto on_host = at::TensorOptions().dtype(dtype).device(c10::kCPU).pinned_memory(true);
    at::Tensor copy = at::empty(gradient.sizes(), on_host);
    copied_.push_back({param, copy.copy_(gradient, /*non_blocking=*/true)});
  }
}

void Reducer::finish() {
  for (const auto& reduction : running_) {
    if (reduction->holds_wholes && reduction->is_reduced_twice()) {
      give_up_wholes(*reduction); // all all-reduces are started before one is waited for
    }
  }
  while (!running_.empty()) {
    finish_oldest();
  }
}

void Reducer::deliver_copies() {
  if (copied_.empty()) {
    return;
  }
  synchronize(copied_.front().param->unit().runtime().reduce_stream());
  for (Arrived& copied : std::exchange(copied_, {})) {
    deliver(*copied.param, std::move(copied.gradient));
  }
}

void Reducer::forget(const Unit& unit) {
  std::erase_if(running_, [&](const auto& reduction) {
    if (reduction->unit == &unit) {
      let_go(*reduction);
      return true;
    }
    return false;
  });
  for (auto* gradients : {&copied_, &deliveries_}) {
    std::erase_if(*gradients, [&](const Arrived& arrived) { return &arrived.param->unit() == &unit; });
  }
}

// What was begun may still be read and written: its memory is used again after that.
void Reducer::let_go(const Reduction& reduction) {
  order_release([&reduction] {
    const Runtime& runtime = reduction.unit->runtime();
    if (reduction.work && has_streams(reduction.unit->device())) { // else the host would wait, perhaps for ever
      const StreamGuard on_stream(runtime.reduce_stream());
      try {
        reduction.work->wait();
      } catch (const std::exception&) { // it has failed, and touches nothing any more
      }
    }
    wait_stream(runtime.reduce_stream(), runtime.all_reduce_stream());
    for (const Stream& stream : reduction.gradient_streams) {
      wait_stream(stream, runtime.reduce_stream());
    }
  });
}

int64_t Reducer::bytes_in_flight() const {
  int64_t total = 0;
  for (const auto& reduction : running_) {
    total += reduction->bytes;
  }
  return total;
}

} // namespace fsdp::engine
