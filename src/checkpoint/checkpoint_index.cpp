#include "checkpoint/checkpoint_index.h"

#include <algorithm>

#include <c10/util/accumulate.h>

#include "base/check.h"
#include "base/log.h"
#include "checkpoint/covers.h"

namespace fsdp::disk {

int64_t IndexedTensor::numel() const {
  return c10::multiply_integers(sizes);
}

namespace {

void add_tensor(IndexedTensor& known, const IndexedTensor& more, const std::string& name) {
  FSDP_CHECK(
      known.sizes == more.sizes && known.dtype == more.dtype && known.strides == more.strides,
      "[save] '{}' has sizes {} ({}) on one rank and {} ({}) on another: save the same model on all ranks",
      name,
      c10::IntArrayRef(known.sizes),
      known.dtype,
      c10::IntArrayRef(more.sizes),
      more.dtype);
  known.pieces.insert(known.pieces.end(), more.pieces.begin(), more.pieces.end());
}

void warn_if_different(const OptimizerNumbers::Group& known, const OptimizerNumbers::Group& more) {
  for (const auto& [name, value] : known.options) {
    const auto other = more.options.find(name);
    if (other == more.options.end() || !(other->second == value)) {
      log::warn_once("[save] the ranks' optimizers differ in '" + name + "': the first rank's is saved, for all");
    }
  }
}

void add_numbers(OptimizerNumbers& known, const OptimizerNumbers& more) {
  for (const auto& [name, values] : more.of_params) {
    const auto [place, is_new] = known.of_params.emplace(name, values);
    FSDP_CHECK(
        is_new || place->second == values,
        "[save] the ranks have updated '{}' differently often: let all ranks step alike",
        name);
  }
  if (known.groups.empty()) {
    known.groups = more.groups;
  }
  if (known.groups.size() != more.groups.size()) {
    log::warn_once(
        "[save] the ranks' optimizers have different numbers of groups: the first rank's are saved, for all");
  }
  for (size_t i = 0; i < std::min(known.groups.size(), more.groups.size()); ++i) {
    warn_if_different(known.groups[i], more.groups[i]);
  }
}

void check_same(const char* what, int64_t known, int64_t more) {
  FSDP_CHECK(
      known == more, "[save] {} is {} on one rank and {} on another: give the same on all ranks", what, known, more);
}

} // namespace

void add_part(CheckpointIndex& index, const CheckpointIndex& part) {
  check_same("the step", index.step, part.step);
  check_same("block_bytes", index.block_bytes, part.block_bytes);
  for (const auto& [name, tensor] : part.tensors) {
    const auto [place, is_new] = index.tensors.emplace(name, tensor);
    if (!is_new) {
      add_tensor(place->second, tensor, name);
    }
  }
  if (part.optimizer) {
    index.optimizer = index.optimizer.value_or(OptimizerNumbers());
    add_numbers(*index.optimizer, *part.optimizer);
  }
  index.extra.insert(part.extra.begin(), part.extra.end());
}

void check_complete(const CheckpointIndex& index) {
  for (const auto& [name, tensor] : index.tensors) {
    FSDP_CHECK(
        covers(tensor, Extent::one_run(0, tensor.numel())),
        "[save] the ranks have not all elements of '{}', or some of them twice: save on all ranks of its mesh, and "
        "give what is not sharded to the first rank too",
        name);
  }
}

} // namespace fsdp::disk
