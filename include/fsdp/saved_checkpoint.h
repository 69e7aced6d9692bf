#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <fsdp/export.h>
#include <fsdp/optim_state_dict.h>

namespace fsdp {

/// A checkpoint to look into: tensors are read one at a time, whole, and checked. For one thread.
class FSDP_API SavedCheckpoint {
 public:
  /// Of a checkpoint's path, or the latest in a run's folder.
  explicit SavedCheckpoint(const std::string& dir);
  ~SavedCheckpoint();
  SavedCheckpoint(const SavedCheckpoint&) = delete;
  SavedCheckpoint& operator=(const SavedCheckpoint&) = delete;

  const std::string& path() const;
  int64_t step() const;
  /// Without tensors.
  const std::map<std::string, c10::IValue>& extra() const;
  /// On the meta device, by their names: "model/NAME", "optimizer/NAME/KEY", "extra/NAME", "random/RANK/DEVICE".
  std::map<std::string, at::Tensor> tensors() const;
  /// Its numbers, of each parameter and each group; unset if it was saved without an optimizer.
  std::optional<OptimStateDict> optimizer() const;

  at::Tensor read(const std::string& name);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace fsdp
