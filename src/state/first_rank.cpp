#include "state/first_rank.h"

#include <ATen/ops/empty.h>

#include "nn/same_values.h"
#include "state/all_ranks.h"

namespace fsdp::state {

FromFirstRank::FromFirstRank(const std::vector<NamedTensor>& tensors, const char* operation)
    : label_{operation, ""}, is_first_(is_first_rank(tensors)), mesh_(mesh_of(tensors, operation)) {}

std::string FromFirstRank::text(std::string mine) const {
  for (int dim = mesh_ ? mesh_->ndim() - 1 : -1; dim >= 0; --dim) {
    mine = mesh_->group(dim)->exchange(mine, label_)[0];
  }
  return mine;
}

at::Tensor FromFirstRank::values(c10::IntArrayRef sizes, c10::ScalarType dtype, const at::Tensor* mine) const {
  if (!mesh_) {
    return mine != nullptr ? *mine : at::Tensor();
  }
  at::Tensor whole = at::empty(sizes, at::TensorOptions().dtype(dtype).device(mesh_->device()));
  if (is_first_) {
    whole.copy_(*mine);
  }
  nn::broadcast_from_first(whole, *mesh_, label_);
  return whole;
}

} // namespace fsdp::state
