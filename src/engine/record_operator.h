#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp::engine {

/// An operator that is called during a recording: it is recorded; or it runs, if there is nothing to record.
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace fsdp::engine
