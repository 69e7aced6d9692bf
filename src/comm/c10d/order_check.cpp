#include "comm/c10d/order_check.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "base/phrase.h"
#include "comm/words.h"

namespace fsdp::adapter {
namespace {

constexpr int64_t kUnset = -1;

/// As it travels. Texts are cut off, and unused bytes are zero, so records can be compared byte by byte.
struct Wire {
  int64_t sequence = 0;
  int64_t bytes = 0;
  int64_t check_order = kUnset;
  char collective[32] = {};
  char operation[48] = {};
  char unit[160] = {};

  friend bool operator==(const Wire& a, const Wire& b) {
    return std::memcmp(&a, &b, sizeof(Wire)) == 0;
  }
};
static_assert(std::has_unique_object_representations_v<Wire>);

template <size_t N>
void store(char (&field)[N], const std::string& text) {
  // The end of a long name tells more than its beginning.
  const size_t skipped = text.size() < N ? 0 : text.size() - (N - 1);
  std::memcpy(field, text.data() + skipped, text.size() - skipped);
}

/// All zeros, where the exchange was broken off.
bool has_come(const Wire& wire) {
  return wire.collective[0] != '\0';
}

std::string describe(const Wire& wire) {
  const std::string what = fsdp::describe(wire.operation, wire.unit);
  return phrase("{} ({}, {} bytes, number {})", what, wire.collective, wire.bytes, wire.sequence);
}

std::string setting(const Wire& wire) {
  return wire.check_order == kUnset ? "none" : std::to_string(wire.check_order);
}

at::Tensor host_bytes(int64_t bytes, c10::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(!device.is_cpu()));
}

} // namespace

at::Tensor order_record(const CollectiveId& id, int64_t bytes, c10::Device device, std::optional<bool> check_order) {
  Wire wire;
  wire.sequence = id.number;
  wire.bytes = bytes;
  wire.check_order = check_order ? *check_order : kUnset;
  store(wire.collective, id.collective);
  store(wire.operation, id.label.operation);
  store(wire.unit, id.label.unit);
  at::Tensor tensor = host_bytes(sizeof(Wire), device);
  std::memcpy(tensor.mutable_data_ptr(), &wire, sizeof(Wire));
  return tensor;
}

std::string find_mismatch(const at::Tensor& records, int rank, int size) {
  std::vector<Wire> wires(size);
  std::memcpy(wires.data(), records.const_data_ptr(), size * sizeof(Wire));
  const Wire& mine = wires[rank];
  const auto other =
      std::find_if(wires.begin(), wires.end(), [&](const Wire& wire) { return has_come(wire) && !(wire == mine); });
  if (other == wires.end() || !has_come(mine)) {
    return "";
  }
  if (other->check_order != mine.check_order) {
    return phrase(
        "all ranks must have the same FSDP_CHECK_ORDER, but rank {} has {} and rank {} has {}: set it for all, or for "
        "none",
        rank,
        setting(mine),
        other - wires.begin(),
        setting(*other));
  }
  return phrase(
      "all ranks must agree, but rank {} calls {} where rank {} calls {}",
      rank,
      describe(mine),
      other - wires.begin(),
      describe(*other));
}

void OrderRecords::add(const at::Tensor& all, at::Tensor mine) {
  Records records{
      .all = all.is_cpu() ? all : host_bytes(all.numel(), all.device()), .mine = std::move(mine), .arrived = {}};
  if (!all.is_cpu()) {
    records.all.copy_(all, /*non_blocking=*/true);
    records.arrived.record(current_stream(all.device()));
  }
  records_.push_back(std::move(records));
}

std::string OrderRecords::find_mismatch(int rank, int size) {
  std::string mismatch;
  while (mismatch.empty() && !records_.empty() && records_.front().arrived.query()) {
    mismatch = adapter::find_mismatch(records_.front().all, rank, size);
    records_.pop_front();
  }
  return mismatch;
}

} // namespace fsdp::adapter
