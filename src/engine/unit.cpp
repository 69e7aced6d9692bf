#include "engine/unit.h"

#include <algorithm>
#include <exception>

#include "base/check.h"
#include "base/format.h"
#include "base/tracing.h"
#include "engine/at_work.h"
#include "engine/backward_graph.h"
#include "engine/extended_bucket.h"
#include "engine/flat_bucket.h"
#include "engine/group_users.h"
#include "engine/recorded_storage.h"

namespace fsdp::engine {

std::shared_ptr<Unit> Unit::create(UnitSpec spec) {
  std::shared_ptr<Unit> unit(new Unit(std::move(spec)));
  unit->join(std::make_shared<Runtime>(unit->device()), 0);
  unit->add_params();
  return unit;
}

Unit::Unit(UnitSpec spec) : on_streams_(has_streams(spec.device)), spec_(std::move(spec)) {
  set_name(spec_.name);
  policy.reshard_after_forward = spec_.reshard_after_forward.reshard();
  policy.reshard_to = spec_.reshard_after_forward.ranks();
}

Unit::~Unit() {
  for (auto& bucket : buckets_) {
    group_users::forget(bucket->shard_group(), *this);
  }
  if (runtime_) {
    const auto lock = runtime_->lock(); // others of its model may go on another thread
    runtime_->remove(*this);
    runtime_->each_unit([this](Unit& left) {
      if (left.parent_ == this) {
        left.parent_ = parent_;
      }
    });
  }
}

Bucket& Unit::bucket_for(const ParamSpec& param) {
  const Mesh mesh = param.placement.mesh.value_or(spec_.mesh);
  const bool extended = param.placement.extension != nullptr;
  for (auto& bucket : buckets_) {
    if (bucket->mesh() == mesh && bucket->is_extended() == extended) {
      return *bucket;
    }
  }
  if (extended) {
    buckets_.push_back(std::make_unique<ExtendedBucket>(*this, mesh));
  } else if (spec_.flat) {
    buckets_.push_back(std::make_unique<FlatBucket>(*this, mesh));
  } else {
    buckets_.push_back(std::make_unique<Bucket>(*this, mesh));
  }
  return *buckets_.back();
}

void Unit::add_params() {
  InternalScope scope;
  auto layouts = layouts_of_params(); // an error leaves the module as it was
  for (size_t i = 0; i < spec_.params.size(); ++i) {
    auto& param_spec = spec_.params[i];
    Bucket& bucket = bucket_for(param_spec);
    param_spec.tensor.mutable_grad().reset(); // of a whole parameter, to which no shard's could be added
    const bool recorded = recorded_storage_of(param_spec.tensor) != nullptr;
    materialize(param_spec.tensor);
    params_.push_back(
        std::make_unique<Param>(*this, bucket, param_spec.name, param_spec.tensor, std::move(layouts[i])));
    Param& param = *params_.back();
    if (recorded) {
      param.leave_whole(); // which goes before the next one comes
    }
    bucket.add(&param, param_spec.placement.extension);
    param.become_handle(param_spec.tensor, bucket.gathered_dtype(param.shard_dtype()));
    param_spec.tensor.reset();
  }
  spec_.params.clear();
  for (auto& bucket : buckets_) {
    if (bucket->has_values()) {
      settle(*bucket, "fully_shard");
    }
  }
  look_for_params_on_meta();
}

void Unit::look_for_params_on_meta() {
  on_meta_ = std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->on_meta(); });
}

void Unit::settle(Bucket& bucket, const char* operation) {
  bucket.settle(label(operation));
  runtime_->shards_change(); // they were copied to where they are now
  if (policy.reshard_to) {
    bucket.settle_among(*policy.reshard_to, label(operation));
  }
  gathers_together_ =
      std::any_of(buckets_.begin(), buckets_.end(), [](const auto& each) { return each->gathers_together(); });
  runtime_->look_at_units();
}

void Unit::set_name(std::string name) {
  spec_.name = std::move(name);
  display_name_ = spec_.name.empty() ? "(root)" : spec_.name;
}

void Unit::join(std::shared_ptr<Runtime> runtime, int number) {
  auto former = std::exchange(runtime_, std::move(runtime));
  number_ = number;
  if (former && former != runtime_) {
    former->remove(*this);
  }
  if (former != runtime_) {
    runtime_->add(*this);
  }
}

bool Unit::is_ancestor_of(const Unit& other) const {
  for (const Unit* unit = other.parent_; unit != nullptr; unit = unit->parent_) {
    if (unit == this) {
      return true;
    }
  }
  return false;
}

std::vector<Unit*> Unit::with_those_below() {
  std::vector<Unit*> units{this};
  runtime_->each_unit([&](Unit& unit) {
    if (is_ancestor_of(unit)) {
      units.push_back(&unit);
    }
  });
  return units;
}

bool Unit::reshards_after(Phase phase) const {
  if (phase == Phase::kBackward) {
    return policy.reshard_after_backward;
  }
  return policy.reshard_after_forward.value_or(parent_ != nullptr);
}

// What fails half way, a user's extension perhaps, leaves a sharded unit behind.
template <typename Gather>
void Unit::or_release(const Gather& gather) {
  try {
    gather();
  } catch (...) {
    for (auto& bucket : buckets_) {
      group_users::end_reading(*bucket->gather_group, *this);
      bucket->release();
    }
    state_ = UnitState::kSharded;
    requested = false;
    ahead = GatheredFor::kNobody;
    runtime_->unit_changed(*this, EventKind::kReshard);
    throw;
  }
}

void Unit::unshard() {
  if (state_ != UnitState::kSharded) {
    return;
  }
  const tracing::Span span("gather", display_name());
  settle_replaced_shards();
  for (const auto& bucket : buckets_) {
    if (!bucket->has_values()) {
      check_materialized();
    }
  }
  runtime_->order_gather();
  StreamGuard on_stream(runtime_->gather_stream());
  or_release([&] {
    for (auto& bucket : buckets_) {
      bucket->gather(label("unshard"));
      if (bucket->reads_in_place() && bucket->gather_group->size() > 1) { // alone, nobody waits for readers
        group_users::begin_reading(*bucket->gather_group, *this);
      }
    }
  });
  state_ = UnitState::kArriving;
  runtime_->unit_changed(*this, EventKind::kUnshard);
}

void Unit::wait() {
  if (state_ != UnitState::kArriving) {
    order_reader();
    return;
  }
  const tracing::Span span("wait for parameters", display_name());
  or_release([&] {
    for (auto& bucket : buckets_) {
      bucket->wait();
    }
  });
  state_ = UnitState::kWhole;
  note_arrival();
  runtime_->unit_changed(*this, EventKind::kWait);
}

void Unit::note_arrival() {
  if (on_streams_) {
    const Stream reader = current_stream(spec_.device);
    arrived_.record(reader);
    uses_.clear();
    uses_.begin(reader);
  }
}

// What was gathered ahead and is left behind: nobody has used it, so the next gather need not come after what is queued
// on the current stream; but a write to the shards there comes after this gather has read them.
void Unit::wait_unseen() {
  const tracing::Span span("wait for parameters", display_name());
  const Stream writer = current_stream(spec_.device), gathers = runtime_->gather_stream();
  const StreamGuard on_stream(gathers);
  or_release([&] {
    for (auto& bucket : buckets_) {
      bucket->wait_unseen();
      wait_stream(writer, gathers);
    }
  });
  uses_.clear();
}

// Whatever stream was the first to wait for the parameters: others come after their arrival too, not after its work.
void Unit::order_reader() {
  if (on_streams_ && state_ == UnitState::kWhole) {
    const Stream reader = current_stream(spec_.device);
    if (uses_.begin(reader)) {
      arrived_.block(reader);
    }
  }
}

void Unit::reshard(Left left) {
  requested = false;
  ahead = GatheredFor::kNobody;
  kept_through_backward = left_by_backward = false;
  if (state_ == UnitState::kSharded) {
    return;
  }
  if (state_ == UnitState::kArriving) {
    wait_unseen();
  } else if (left == Left::kUnknown || is_private()) {
    wait();
  }
  const tracing::Span span("reshard", display_name());
  state_ = UnitState::kSharded;
  std::exception_ptr error;
  try {
    before_release(left);
  } catch (...) {
    error = std::current_exception();
  }
  for (auto& bucket : buckets_) {
    if (error || bucket->is_private()) {
      release(*bucket);
    }
  }
  runtime_->unit_changed(*this, EventKind::kReshard);
  if (error) {
    std::rethrow_exception(error);
  }
}

// Others may wait for what is only read to be released, before they let this rank write.
void Unit::before_release(Left left) {
  for (auto& bucket : buckets_) {
    group_users::end_reading(*bucket->gather_group, *this);
    if (bucket->is_private()) {
      continue;
    }
    if (policy.reshard_to && left == Left::kForItsBackward && runtime_->trains_something()) {
      const StreamGuard on_stream(runtime_->gather_stream());
      bucket->keep_share(label("reshard"));
    }
    release(*bucket);
  }
  for (auto& bucket : buckets_) {
    if (bucket->is_private()) {
      runtime_->shards_change();
      bucket->write_back();
    }
  }
}

// The gather stream reuses the memory after the last uses, and not after all that was queued since. What was unpacked
// lies in memory of the streams that use it.
void Unit::release(Bucket& bucket) {
  if (!on_streams_) {
    bucket.release();
    return;
  }
  const Stream gathers = runtime_->gather_stream();
  uses_.block(gathers);
  uses_.join();
  const StreamGuard on_stream(gathers);
  bucket.release();
}

void Unit::before_shard_write(Param& param) {
  FSDP_CHECK(
      held == 0 || !is_private(),
      "[write to shard] '{}' was written as a shard while it is shown whole, by summon_full_params or as another "
      "argument: write what parameters() gives there, or after it",
      param.name());
  if (state_ != UnitState::kSharded) {
    const AtWork at_work(*runtime_);
    reshard();
  }
  runtime_->shards_change();
  param.bucket().values_change(param);
  param.bucket().begin_write();
  runtime_->note_seen_write();
  if (param.bucket().reads_in_place()) { // then it has begun a write phase, which holds for what nobody sees, too
    const auto lock = runtime_->lock();
    runtime_->end_unseen_writes(param.bucket().gather_group);
  }
}

void Unit::before_shard_read(const Param* param) {
  const bool is_summoned_to_write = summoned > 0 && summoned_to_read == 0;
  if (!is_private() || (held > 0 && !is_summoned_to_write)) {
    return;
  }
  const AtWork at_work(*runtime_);
  for (auto& bucket : buckets_) {
    if (held > 0) {
      bucket->write_back_alone(param);
    } else if (bucket->is_private()) { // it stays so: one rank may read alone
      runtime_->shards_change();
      bucket->write_back();
    }
  }
}

void Unit::expect_unseen_writes() {
  if (held == 0) {
    reshard();
  }
  runtime_->shards_change();
  for (auto& param : params_) {
    param->values_change();
  }
  for (auto& bucket : buckets_) {
    bucket->begin_write();
  }
}

void Unit::settle_replaced_shards() {
  for (auto& bucket : buckets_) {
    const auto& params = bucket->params();
    if (std::none_of(params.begin(), params.end(), [](const Param* param) { return param->shard_was_replaced(); })) {
      continue;
    }
    reshard();
    for (Param* param : params) {
      param->adopt_replacement();
    }
    look_for_params_on_meta();
    const bool new_values =
        std::any_of(params.begin(), params.end(), [](const Param* param) { return param->shard_was_replaced(); });
    if (new_values && bucket->has_values()) {
      settle(*bucket, "data given to parameters");
    }
  }
}

void Unit::compute_in(std::optional<c10::ScalarType> param_dtype) {
  if (held == 0) { // else it is shown as it is stored
    reshard();
  }
  spec_.precision.param_dtype = param_dtype;
  for (auto& param : params_) {
    param->values_change();
  }
  for (auto& bucket : buckets_) {
    if (bucket->has_values()) {
      settle(*bucket, "train or eval");
    }
  }
}

void Unit::check_materialized() const {
  if (std::none_of(params_.begin(), params_.end(), [](const auto& param) { return param->on_meta(); })) {
    return;
  }
  std::vector<std::string> missing; // here, and in the units that will be asked next
  runtime_->each_unit([&missing](const Unit& unit) {
    for (const auto& param : unit.params_) {
      if (param->on_meta()) {
        missing.push_back(param->name());
      }
    }
  });
  FSDP_CHECK(
      missing.empty(),
      "[unshard] FSDP parameters should be materialized from meta device before training, but the following were still "
      "on meta device: {}. Make them (fsdp::to_empty(model), in Python model.to_empty(device=...)) and give them "
      "values",
      fsdp::join(missing));
}

c10::ScalarType Unit::reduce_dtype_of(const Param& param) const {
  const auto gathered = param.gathered_dtype();
  if (c10::isComplexType(gathered)) { // which stays as it is, as where it is gathered
    return gathered;
  }
  const auto dtype = spec_.precision.reduce_dtype.value_or(gathered);
  return dtype == kShardDtype ? param.shard_dtype() : dtype;
}

void Unit::gradient_on_stream(bool adds) {
  if (on_streams_) {
    const Stream stream = current_stream(spec_.device);
    gradient_streams.begin(stream);
    if (adds) {
      gradient_streams.block(stream);
    }
  }
}

bool Unit::has_put_off_parts() const {
  return policy.requires_all_reduce &&
         std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->partial.defined(); });
}

bool Unit::awaits_reduction() const {
  return std::any_of(params_.begin(), params_.end(), [this](const auto& param) {
    return param->gradient.defined() || (!reduced && param->takes_part_in_reduction());
  });
}

int64_t Unit::gradient_bytes() const {
  int64_t total = 0;
  for (const auto& param : params_) {
    total += param->gradient.defined() ? static_cast<int64_t>(param->gradient.nbytes()) : 0;
  }
  return total;
}

void Unit::move_waiting_gradients(WaitingMove move) {
  if (!policy.shows_waiting_gradients) {
    return;
  }
  const auto waits = [](const auto& param) { return param->gradient.defined(); };
  const bool any = std::any_of(params_.begin(), params_.end(), waits);
  if (any) {
    gradient_on_stream(/*adds=*/true);
  }
  for (const auto& bucket : buckets_) {
    bucket->move_waiting_gradients(move);
  }
  if (any) { // they may be copied here, and give their memory back to other streams
    gradient_streams.join();
  }
}

void Unit::follow_requires_grad() {
  for (auto& param : params_) {
    param->follow_requires_grad();
  }
}

void Unit::expect_gradients(const BackwardGraph& graph, bool nested) {
  if (std::exchange(graph_, graph.id()) != graph.id()) {
    for (auto& param : params_) {
      param->follow_dropped_gradient();
      param->expect_gradient(graph, nested);
    }
  }
}

void Unit::end_backward() {
  used_in_backward = gathered_in_backward = reduced = false;
  prefetched = false;
}

void Unit::forget_uses() {
  end_backward();
  awaiting_ = 0;
  for (auto& param : params_) {
    param->forget_uses();
  }
  drop_shares();
}

void Unit::drop_shares() {
  for (auto& bucket : buckets_) {
    bucket->drop_share();
  }
}

void Unit::reset() {
  forget_uses();
  move_waiting_gradients(WaitingMove::kTakeBack);
  order_release([this] { gradient_streams.join(); });
  for (auto& param : params_) {
    param->drop_gradient();
  }
  gradient_streams.clear();
  summoned = summoned_by_one = summoned_to_read = 0;
  if (std::exchange(held, 0) > 0 && is_private()) { // a write, or a guard, that was broken off
    discard_private();
  }
  reshard();
}

int64_t Unit::whole_bytes() const {
  int64_t total = 0;
  for (const auto& bucket : buckets_) {
    total += bucket->bytes();
  }
  return total;
}

int64_t Unit::predicted_whole_bytes() const {
  int64_t total = 0;
  for (const auto& param : params_) {
    total += param->gathered_bytes();
  }
  return total;
}

} // namespace fsdp::engine
