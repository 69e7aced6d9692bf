#include "engine/recording.h"

#include <utility>

#include "base/check.h"
#include "engine/given_tensors.h"
#include "engine/recorded_storage.h"

namespace fsdp::engine {

Recording::Recording() : keys_(kKey) {
  ++depth;
}

Recording::~Recording() {
  if (--depth == 0) {
    forget_scratch();
  }
}

Recording::Pause::Pause() : depth_(std::exchange(depth, 0)) {
  if (depth_ != 0) {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.included_ = keys.included_.remove(kKey);
    keys_.emplace(keys);
  }
}

Recording::Pause::~Pause() {
  depth = depth_;
}

void use_recorded(const at::Tensor& recorded, const std::string& operation) {
  FSDP_CHECK(
      !recorded.requires_grad(),
      "[{}] was given a parameter that deferred_init has recorded, and that has no memory yet: call fully_shard or "
      "FullyShardedDataParallel on its module, or fsdp::materialize(module) if it is not to be sharded; what is to "
      "change the values before that belongs into the function that deferred_init calls",
      operation);
  make_values(recorded);
}

} // namespace fsdp::engine
