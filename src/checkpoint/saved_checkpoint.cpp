#include <fsdp/saved_checkpoint.h>

#include <ATen/ops/empty_strided.h>

#include "base/check.h"
#include "checkpoint/open_index.h"
#include "checkpoint/piece_reader.h"

namespace fsdp {

struct SavedCheckpoint::Impl {
  explicit Impl(const std::string& dir)
      : path(disk::find_checkpoint(dir)), index(disk::read_index(path)), reader(path, index) {}

  std::string path;
  disk::CheckpointIndex index;
  disk::PieceReader reader;
};

SavedCheckpoint::SavedCheckpoint(const std::string& dir) : impl_(std::make_unique<Impl>(dir)) {}
SavedCheckpoint::~SavedCheckpoint() = default;

const std::string& SavedCheckpoint::path() const {
  return impl_->path;
}

int64_t SavedCheckpoint::step() const {
  return impl_->index.step;
}

const std::map<std::string, c10::IValue>& SavedCheckpoint::extra() const {
  return impl_->index.extra;
}

std::map<std::string, at::Tensor> SavedCheckpoint::tensors() const {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : impl_->index.tensors) {
    const auto options = at::TensorOptions().dtype(tensor.dtype).device(c10::kMeta);
    tensors[name] = at::empty_strided(tensor.sizes, tensor.strides, options);
  }
  return tensors;
}

std::optional<OptimStateDict> SavedCheckpoint::optimizer() const {
  if (!impl_->index.optimizer) {
    return std::nullopt;
  }
  OptimStateDict numbers;
  for (const auto& [name, scalars] : impl_->index.optimizer->of_params) {
    numbers.state.insert(name, {.scalars = scalars});
  }
  for (const auto& group : impl_->index.optimizer->groups) {
    numbers.param_groups.push_back({group.params, group.options});
  }
  return numbers;
}

at::Tensor SavedCheckpoint::read(const std::string& name) {
  FSDP_CHECK(impl_->index.tensors.count(name) != 0, "[load] {} has no tensor '{}': see tensors()", impl_->path, name);
  return impl_->reader.read_whole(name);
}

} // namespace fsdp
