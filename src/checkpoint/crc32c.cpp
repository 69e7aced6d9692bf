#include "checkpoint/crc32c.h"

#include <array>
#include <cstring>

namespace fsdp::disk {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78; // the lowest bit stands for the highest power

// tables[n][byte]: what a byte does to a checksum that n more bytes follow.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) {
      rest = (rest >> 1) ^ ((rest & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = rest;
  }
  for (size_t n = 1; n < tables.size(); ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t shorter = tables[n - 1][byte];
      tables[n][byte] = (shorter >> 8) ^ tables[0][shorter & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t eight_bytes(const unsigned char* place) {
  uint64_t word = 0;
  std::memcpy(&word, place, sizeof(word));
  return word;
}

#if defined(__x86_64__)
constexpr size_t kStripe = 4096;

/// What `kStripe` zeros do to a checksum that they follow. It is linear: the sum of what they do to its bits.
class Zeros {
 public:
  Zeros() {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      uint32_t rest = uint32_t{1} << bit;
      for (size_t i = 0; i < kStripe; ++i) {
        rest = (rest >> 8) ^ kTables[0][rest & 0xff];
      }
      for (uint32_t byte = 0; byte < 256; ++byte) {
        of_byte_[bit / 8][byte] ^= (byte >> (bit % 8) & 1) != 0 ? rest : 0;
      }
    }
  }
  uint32_t after(uint32_t rest) const {
    return of_byte_[0][rest & 0xff] ^ of_byte_[1][rest >> 8 & 0xff] ^ of_byte_[2][rest >> 16 & 0xff] ^
           of_byte_[3][rest >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> of_byte_{};
};

/// Three stripes at a time: the instruction takes three cycles, and one can begin in each.
__attribute__((target("sse4.2"))) uint32_t by_stripes(const unsigned char* place, size_t stripes, uint32_t rest) {
  static const Zeros zeros;
  for (; stripes >= 3; stripes -= 3, place += 3 * kStripe) {
    uint64_t first = rest, second = 0, third = 0;
    for (size_t i = 0; i < kStripe; i += 8) {
      first = __builtin_ia32_crc32di(first, eight_bytes(place + i));
      second = __builtin_ia32_crc32di(second, eight_bytes(place + kStripe + i));
      third = __builtin_ia32_crc32di(third, eight_bytes(place + 2 * kStripe + i));
    }
    rest = zeros.after(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    rest = zeros.after(rest) ^ static_cast<uint32_t>(third);
  }
  return rest;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(const unsigned char* place, size_t bytes, uint32_t rest) {
  const size_t stripes = bytes / kStripe / 3 * 3;
  rest = by_stripes(place, stripes, rest);
  place += stripes * kStripe;
  bytes -= stripes * kStripe;
  uint64_t wide = rest;
  for (; bytes >= 8; bytes -= 8, place += 8) {
    wide = __builtin_ia32_crc32di(wide, eight_bytes(place));
  }
  rest = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes, ++place) {
    rest = __builtin_ia32_crc32qi(rest, *place);
  }
  return rest;
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}
#endif

} // namespace

// Words are taken as they lie in memory, the lowest byte first, which is how the elements of tensors lie in files too.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before) {
  const auto* place = static_cast<const unsigned char*>(data);
  uint32_t rest = ~before;
  for (; bytes >= 8; bytes -= 8, place += 8) {
    const uint64_t word = eight_bytes(place) ^ rest;
    rest = 0;
    for (size_t i = 0; i < 8; ++i) {
      rest ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
    }
  }
  for (; bytes > 0; --bytes, ++place) {
    rest = (rest >> 8) ^ kTables[0][(rest ^ *place) & 0xff];
  }
  return ~rest;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#if defined(__x86_64__)
  if (has_instruction()) {
    return ~by_instruction(static_cast<const unsigned char*>(data), bytes, ~before);
  }
#endif
  return crc32c_by_table(data, bytes, before);
}

} // namespace fsdp::disk
