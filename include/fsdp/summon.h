#pragma once

#include <memory>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

struct SummonOptions {
  bool recurse = true; ///< also the units below
  bool writeback = true; ///< changes reach the shards, and with `with_grads` their gradients, when the guard ends
  bool rank0_only = false; ///< the others keep their shards; needs writeback = false
  bool offload_to_cpu = false; ///< the whole parameters live on the host
  bool with_grads = false; ///< gradients whole too
};

/// While it lives, `module.parameters()` are whole, plain tensors, which may be read and written.
/// Collective, at its construction and at its end. Not in a backward. Between a forward and its backward for reading:
/// what is written then is a write to what the graph has saved. It may outlive the module if shared pointers own that.
class FSDP_API SummonedParams {
 public:
  struct Impl;
  explicit SummonedParams(std::unique_ptr<Impl> impl);
  SummonedParams(SummonedParams&&) noexcept;
  SummonedParams& operator=(SummonedParams&&) = delete;
  ~SummonedParams();

  /// Ends it now, with an error where changes could not be written back; the destructor can only log that.
  void end();

 private:
  std::unique_ptr<Impl> impl_;
};

[[nodiscard]] FSDP_API SummonedParams summon_full_params(ModuleRef module, const SummonOptions& options = {});

} // namespace fsdp
