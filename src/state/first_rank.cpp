#include "state/first_rank.h"

#include <algorithm>

#include <ATen/ops/empty.h>

#include "base/check.h"
#include "base/phrase.h"
#include "nn/same_values.h"
#include "state/all_ranks.h"

namespace fsdp::state {

FromFirstRank::FromFirstRank(const std::vector<NamedTensor>& tensors, const char* operation)
    : label_{operation, ""}, is_first_(is_first_rank(tensors)), mesh_(mesh_of(tensors, operation)) {}

namespace {

std::string names_and_sizes(const std::vector<NamedTensor>& tensors) {
  std::string lines;
  for (const auto& tensor : tensors) {
    lines += phrase("'{}' of {} with sizes {}\n", tensor.name, tensor.tensor.dtype().name(), tensor.sizes());
  }
  return lines;
}

std::string first_other_line(const std::string& lines, const std::string& others) {
  const size_t at = std::mismatch(lines.begin(), lines.end(), others.begin(), others.end()).first - lines.begin();
  const size_t begin = at == 0 ? 0 : lines.rfind('\n', at - 1) + 1;
  return begin < lines.size() ? lines.substr(begin, lines.find('\n', begin) - begin) : "nothing more";
}

} // namespace

void FromFirstRank::check_alike(const std::vector<NamedTensor>& tensors) const {
  const std::string here = names_and_sizes(tensors), there = text(is_first_ ? here : "");
  check_on_all_ranks(mesh_, label_, [&] {
    FSDP_CHECK(
        !mesh_ || here == there,
        "[{}] the first rank's model has {}, another's has {}: with broadcast_from_rank0 all need the same",
        label_.operation,
        first_other_line(there, here),
        first_other_line(here, there));
  });
}

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
