// Whole parameters that may be written: a unit's private copies of them.

#include "engine/unit.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "engine/bucket.h"
#include "engine/group_users.h"
#include "engine/runtime.h"

namespace fsdp::engine {

void Unit::make_private(Bucket& bucket) {
  TORCH_INTERNAL_ASSERT(state_ == UnitState::kWhole);
  if (on_streams_) {
    uses_.block(current_stream(spec_.device));
  }
  bucket.make_private();
  note_arrival();
  group_users::end_reading(*bucket.gather_group, *this); // it has memory of its own now
}

std::unordered_map<const Param*, at::Tensor> Unit::put_together(c10::Device target, const char* operation) {
  settle_replaced_shards();
  check_materialized();
  runtime_->order_gather();
  wait_stream(current_stream(spec_.device), runtime_->gather_stream());
  std::unordered_map<const Param*, at::Tensor> wholes;
  for (const auto& bucket : buckets_) {
    const auto of_bucket = bucket->put_together(target, label(operation));
    for (size_t i = 0; i < of_bucket.size(); ++i) {
      wholes[bucket->params()[i]] = of_bucket[i];
    }
  }
  return wholes;
}

void Unit::unshard_as_stored(c10::Device device, bool show) {
  if (is_private() && held == 0) {
    reshard(); // what was written to handles reaches the shards, whatever becomes of what is written from now on
  }
  for (const auto& bucket : buckets_) {
    bucket->check_writable();
  }
  const auto wholes = put_together(device, "summon_full_params");
  if (is_private()) {
    return;
  }
  reshard(); // also where nothing is shown: what one rank gathers next, all gather
  if (!show) {
    return;
  }
  for (const auto& bucket : buckets_) {
    std::vector<at::Tensor> copies;
    for (const Param* param : bucket->params()) {
      copies.push_back(wholes.at(param));
    }
    bucket->make_private(std::move(copies));
    bucket->expect_writes();
  }
  state_ = UnitState::kWhole;
  note_arrival();
  runtime_->unit_changed(*this, EventKind::kUnshard);
  runtime_->unit_changed(*this, EventKind::kWait);
}

bool Unit::is_private() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& bucket) { return bucket->is_private(); });
}

void Unit::write_back(const Param& param) {
  if (!param.bucket().is_private()) {
    return;
  }
  runtime_->shards_change();
  try {
    param.bucket().write_back(param);
  } catch (...) { // nobody is to read what the shards do not have
    discard_private();
    throw;
  }
}

void Unit::go_on_with(Param& param, const at::Tensor& data) {
  const bool has_values =
      data.layout() == c10::kStrided && !data.is_meta(); // else the guard's end says what it expects
  if (param.bucket().is_private() && has_values && data.sizes() == param.layout().sizes()) {
    if (on_streams_) {
      uses_.block(current_stream(spec_.device));
    }
    param.bucket().replace_private_copy(param, data.detach());
    note_arrival();
  }
}

void Unit::discard_private() {
  for (auto& bucket : buckets_) {
    bucket->release();
  }
  reshard();
}

} // namespace fsdp::engine
