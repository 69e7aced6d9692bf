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
__attribute__((target("sse4.2"))) uint32_t by_instruction(const unsigned char* place, size_t bytes, uint32_t rest) {
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
