#include "engine/flat_bucket.h"

#include <algorithm>

#include "base/check.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

// Kernels choose their order of additions by the alignment of what they read; from this one on it makes no difference.
constexpr int64_t kAlignment = 16;

int64_t bytes_before(const Param& param) {
  return param.layout().cut().before * static_cast<int64_t>(c10::elementSize(param.gathered_dtype()));
}

} // namespace

void check_one_dtype(const std::vector<NamedDtype>& parameters) {
  const auto other = std::find_if(
      parameters.begin(), parameters.end(), [&](const auto& each) { return each.dtype != parameters[0].dtype; });
  FSDP_CHECK(
      other == parameters.end(),
      "[flat parameter] Must flatten tensors with uniform dtype but got {} and {}: '{}' is of the first, '{}' of the "
      "second. Wrap the modules of each dtype by themselves, or cast them",
      parameters[0].dtype,
      other->dtype,
      parameters[0].name,
      other->name);
}

void FlatBucket::settle(const Label& label) {
  std::vector<NamedDtype> dtypes;
  for (const Param* param : params()) {
    dtypes.push_back({param->name(), param->shard_dtype()});
  }
  check_one_dtype(dtypes);
  Bucket::settle(label);
  if (unit_.flat()->shown_as_one && !flat_shard_) {
    flat_shard_ = std::make_shared<FlatShard>(*this);
    for (Param* param : params()) {
      param->show_as(flat_shard_->shown_for(*param));
    }
  }
  if (flat_shard_) {
    flat_shard_->lie_in(home_->slice(0), home_, params().front()->shard().device());
  }
}

void FlatBucket::values_change(Param& param) {
  if (!flat_shard_) {
    return Bucket::values_change(param);
  }
  for (Param* each : params()) {
    each->values_change();
  }
}

void FlatBucket::move_waiting_gradients(WaitingMove move) {
  flat_shard_ ? flat_shard_->move_waiting_gradient(move) : Bucket::move_waiting_gradients(move);
}

std::vector<Piece> FlatBucket::pieces() const {
  const Param& first = *params().front();
  const int64_t chunk = first.layout().cut().chunk;
  const auto stored = first.shard_dtype();
  return {{chunk * gather_group->size(), chunk, stored, gathered_dtype(stored)}};
}

void* FlatBucket::slice(const Home& home, size_t index) const {
  const Param& param = *params()[index];
  const int64_t offset = param.layout().cut().offset(param.rank());
  return static_cast<char*>(home.slice(0)) + offset * static_cast<int64_t>(c10::elementSize(param.shard_dtype()));
}

void* FlatBucket::whole(const Gathered& gathered, size_t index) const {
  return static_cast<char*>(gathered.piece(0)) + bytes_before(*params()[index]);
}

bool FlatBucket::lies_well(const Param& param) const {
  return bytes_before(param) % kAlignment == 0;
}

} // namespace fsdp::engine
