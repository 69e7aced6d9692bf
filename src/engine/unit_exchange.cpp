// Over which groups, and by whose functions, a unit gathers and reduces.

#include <utility>

#include "base/check.h"
#include "comm/c10d/factory.h"
#include "comm/custom_group.h"
#include "engine/bucket.h"
#include "engine/unit.h"

namespace fsdp::engine {

void Unit::gather_through(CollectiveFn all_gather) {
  FSDP_CHECK(
      held == 0,
      "[set_custom_all_gather] the parameters of '{}' are shown whole by summon_full_params: call it after that guard",
      display_name());
  reshard();
  exchange_.all_gather = std::move(all_gather);
  for (auto& bucket : buckets_) {
    bucket->gather_group = with_all_gather(bucket->shared_shard_group(), exchange_.all_gather);
    settle(*bucket, "set_custom_all_gather");
  }
}

void Unit::reduce_through(CollectiveFn reduce_scatter) {
  exchange_.reduce_scatter = std::move(reduce_scatter);
  choose_reduce_groups();
}

void Unit::separate_reductions(bool separate) {
  exchange_.separate_reductions = separate;
  choose_reduce_groups();
}

void Unit::choose_reduce_groups() {
  for (auto& bucket : buckets_) {
    auto group = bucket->shared_shard_group();
    if (exchange_.separate_reductions) {
      group = group->part(/*color=*/0, "reductions", label("set_separate_reduce_scatter_group"));
    }
    bucket->reduce_group = exchange_.reduce_scatter ? with_reduce_scatter(group, exchange_.reduce_scatter) : group;
    if (exchange_.backend_memory) {
      set_backend_memory(*bucket->reduce_group, true);
    }
  }
}

void Unit::use_backend_memory(bool enable) {
  exchange_.backend_memory = enable;
  for (auto& bucket : buckets_) {
    set_backend_memory(*bucket->gather_group, enable);
    set_backend_memory(*bucket->reduce_group, enable);
  }
}

void Unit::exchange_as(const Unit& other) {
  const Exchange& chosen = other.exchange_;
  if (chosen.all_gather) {
    gather_through(chosen.all_gather);
  }
  if (chosen.reduce_scatter) {
    reduce_through(chosen.reduce_scatter);
  }
  if (chosen.separate_reductions) {
    separate_reductions(true);
  }
  if (chosen.backend_memory) {
    use_backend_memory(true);
  }
}

} // namespace fsdp::engine
