#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fsdp::engine {

/// A kernel for operators that are given handles or shards: what they mean for these, before and after they run.
void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
/// The same within a subclass's own dispatch.
void intercept_inside(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

} // namespace fsdp::engine
