#include "base/nonzero.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace fsdp {
namespace {

constexpr int64_t kFew = 256;

// Without their sign, numbers are in the order of their bits.
template <typename Bits>
Bits magnitude(Bits bits) {
  return bits & (std::numeric_limits<Bits>::max() >> 1);
}

template <typename Bits>
std::optional<int64_t> find(const void* memory, int64_t numel) {
  const auto* numbers = static_cast<const Bits*>(memory);
  for (int64_t begin = 0; begin < numel; begin += kFew) {
    const int64_t end = std::min(begin + kFew, numel);
    Bits any = 0;
    for (int64_t i = begin; i < end; ++i) { // compilers make vector instructions of it
      any |= numbers[i];
    }
    if (magnitude(any) != 0) {
      const auto is_smaller = [](Bits a, Bits b) { return magnitude(a) < magnitude(b); };
      return std::max_element(numbers + begin, numbers + end, is_smaller) - numbers;
    }
  }
  return std::nullopt;
}

std::optional<int64_t> find(const void* memory, int64_t numel, int64_t bytes_of_each) {
  switch (bytes_of_each) {
    case 1:
      return find<uint8_t>(memory, numel);
    case 2:
      return find<uint16_t>(memory, numel);
    case 4:
      return find<uint32_t>(memory, numel);
    case 8:
      return find<uint64_t>(memory, numel);
    default:
      FSDP_CHECK(false, "[gradient] numbers of {} bytes are not known", bytes_of_each);
  }
}

} // namespace

std::optional<int64_t> nonzero_element(const at::Tensor& tensor) {
  const int64_t numbers_in_one = tensor.is_complex() ? 2 : 1;
  const auto bytes_of_each = static_cast<int64_t>(tensor.element_size()) / numbers_in_one;
  const auto found = find(tensor.const_data_ptr(), tensor.numel() * numbers_in_one, bytes_of_each);
  return found ? std::optional(*found / numbers_in_one) : std::nullopt;
}

} // namespace fsdp
