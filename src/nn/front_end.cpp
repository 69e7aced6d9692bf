#include <fsdp/front_end.h>

#include <c10/core/GradMode.h>

#include "base/caller.h"
#include "base/check.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

engine::Param& param_behind(const at::Tensor& tensor, const char* operation) {
  engine::Param* param = engine::param_of(tensor);
  FSDP_CHECK(param != nullptr, "[{}] expected a sharded parameter, got another tensor", operation);
  return *param;
}

} // namespace

bool belongs_to_unit(const at::Tensor& tensor) {
  return engine::param_of(tensor) != nullptr;
}

at::Tensor handle_of(const at::Tensor& shard) {
  auto& param = param_behind(shard, "handle_of");
  auto lock = param.unit().runtime().lock();
  return param.handle();
}

void follow_requires_grad(const at::Tensor& tensor) {
  param_behind(tensor, "follow_requires_grad").follow_requires_grad();
}

at::Tensor piece_of(const at::Tensor& shard, const at::Tensor& whole) {
  const auto& param = param_behind(shard, "piece_of");
  engine::InternalScope scope;
  return param.piece_of(whole);
}

void set_caller(void* (*let_go)(), void (*take_back)(void* token), void (*raise)(std::exception_ptr error)) {
  set_caller(Caller{let_go, take_back, raise});
}

void note_call(const FSDPModule& module) {
  if (module.unit()->parent() != nullptr) {
    return;
  }
  auto& runtime = module.unit()->runtime();
  runtime.note_call();
  runtime.follow_requires_grad();
  if (c10::GradMode::is_enabled() && runtime.awaits_step()) {
    WithoutCallersLock no_callers_lock;
    auto lock = runtime.lock();
    engine::InternalScope scope;
    runtime.begin_step(/*certainly=*/true);
  }
}

void copy_settings(const FSDPModule& from, const FSDPModule& to) {
  auto& policy = to.unit()->policy;
  policy = from.unit()->policy;
  policy.forward_prefetch.clear();
  policy.backward_prefetch.clear();
}

void show_as(const at::Tensor& shard, std::shared_ptr<ShownShard> shown) {
  auto& param = param_behind(shard, "show_as");
  auto lock = param.unit().runtime().lock();
  engine::InternalScope scope;
  param.show_as(std::move(shown));
}

} // namespace fsdp
