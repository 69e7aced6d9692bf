#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "engine/operation.h"
#include "engine/tenant.h"

namespace fsdp::engine {

class Replay;

/// Kept by the tenant of a recorded storage, which is hollow.
struct RecordedStorage {
  std::shared_ptr<const Memory> memory;
  std::shared_ptr<const Operation> values; ///< the last to have written it
  /// Uninitialized memory that is there all the same, until an operator sees it: LibTorch fills it by its address where
  /// it makes a tensor of a list of numbers (`torch::tensor(std::vector{1, 2})`). Kept, as others may have the address.
  at::Tensor by_address;
  at::Tensor seen; ///< what operators have seen there last
  std::shared_ptr<const Operation> of_seen; ///< `values`, unless an operator has written since
  std::string why_hollow;
};

/// Null for a tensor that is not recorded, or has its values by now.
RecordedStorage* recorded_storage_of(const at::Tensor& tensor);

at::Tensor make_recorded_tensor(const TensorGeometry& geometry);
/// Gives it memory for what LibTorch may write there.
void let_write_by_address(const at::Tensor& recorded);
/// An operator sees it: what was written is a constant from now on. An Error if both operators and somebody who has its
/// address have written, unless the operator is to overwrite all of it.
void end_writes_by_address(const at::Tensor& recorded, bool overwritten);
/// What it is, as it is now. `with_values`: those matter.
RecordedTensor described(const at::Tensor& recorded, bool with_values);

/// Gives a recorded tensor's storage, and so all views of it, its values; nothing for other tensors.
void make_values(const at::Tensor& recorded);
/// Makes it a tensor like any other.
void materialize(const at::Tensor& tensor);
/// An Error if it cannot be given its values any more.
void check_can_materialize(const at::Tensor& recorded);
/// A text that differs where its values would.
std::string fingerprint(const at::Tensor& recorded);

} // namespace fsdp::engine
