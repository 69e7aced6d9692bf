#include "comm/c10d/order_check.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

namespace fsdp::adapter {
namespace {

/// As it travels. Texts are cut off, and unused bytes are zero, so records can be compared byte by byte.
struct Wire {
  int64_t sequence = 0;
  int64_t bytes = 0;
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

std::string describe(const Wire& wire) {
  const std::string unit = wire.unit[0] == 0 ? "" : c10::str(" of '", wire.unit, "'");
  return c10::str(wire.operation, unit, " (", wire.collective, ", ", wire.bytes, " bytes, number ", wire.sequence, ")");
}

} // namespace

at::Tensor OrderRecord::to_tensor(c10::Device device) const {
  Wire wire;
  wire.sequence = sequence;
  wire.bytes = bytes;
  store(wire.collective, collective);
  store(wire.operation, label.operation);
  store(wire.unit, label.unit);
  at::Tensor tensor = at::empty({static_cast<int64_t>(sizeof(Wire))}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), &wire, sizeof(Wire));
  return tensor.to(device);
}

std::string find_mismatch(const at::Tensor& records, int rank, int size) {
  std::vector<Wire> wires(size);
  std::memcpy(wires.data(), records.const_data_ptr(), size * sizeof(Wire));
  const Wire& mine = wires[rank];
  const auto other = std::find_if(wires.begin(), wires.end(), [&](const Wire& wire) { return !(wire == mine); });
  if (other == wires.end()) {
    return "";
  }
  return c10::str(
      "all ranks must agree, but rank ",
      rank,
      " calls ",
      describe(mine),
      " where rank ",
      other - wires.begin(),
      " calls ",
      describe(*other));
}

} // namespace fsdp::adapter
