#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

namespace detail {
/// While it lives, operators on this thread are recorded instead of run.
class FSDP_API RecordingScope {
 public:
  RecordingScope();
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
} // namespace detail

/// What `make()` returns, a module say, but parameters and buffers that it makes have no memory yet: how they are made
/// is recorded. `fully_shard` and `FullyShardedDataParallel` give a unit's parameters their values one after another,
/// and keep this rank's part of each, so that a model may be larger than memory:
///
///     auto model = fsdp::deferred_init([&] { return GPT(config); });
///
/// The values are those that `make()` alone would have given, and random number generators are left as it would have
/// left them. Whatever `make` reads (`item()`) is computed for it. Memory by its address is not there.
template <typename Make>
auto deferred_init(Make&& make) {
  const detail::RecordingScope scope;
  return std::forward<Make>(make)();
}

/// Whether the tensor, or a parameter or buffer of the module or of one below it, is recorded and has no memory yet.
FSDP_API bool is_deferred(const at::Tensor& tensor);
FSDP_API bool is_deferred(ConstModuleRef module);

/// Gives all that is recorded of the module and of those below it memory and values: what is not to be sharded. One
/// tensor after another. Nothing for what has values already.
FSDP_API void materialize(ModuleRef module);
/// The same of one tensor, and of all that are views of the same memory.
FSDP_API void materialize(const at::Tensor& tensor);

} // namespace fsdp
