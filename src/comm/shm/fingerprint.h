#pragma once

#include <cstdint>
#include <string_view>

#include <fsdp/group.h>

namespace fsdp::shm {

/// A number that differs when ranks call different collectives (FNV-1a over what they were called with).
class Fingerprint {
 public:
  template <typename... Numbers>
  Fingerprint(std::string_view kind, const Label& label, Numbers... numbers) {
    for (const std::string_view text : {kind, std::string_view(label.operation), std::string_view(label.unit)}) {
      for (const char c : text) {
        mix(static_cast<unsigned char>(c));
      }
      add(text.size());
    }
    add(numbers...);
  }

  template <typename... Numbers>
  void add(Numbers... numbers) {
    ((mix(static_cast<uint64_t>(numbers)), mix(static_cast<uint64_t>(numbers) >> 32)), ...);
  }
  uint64_t value() const {
    return value_;
  }
  /// Of a sequence that has one more.
  static uint64_t appended(uint64_t sequence, uint64_t value) {
    return (sequence ^ value) * kPrime;
  }

 private:
  void mix(uint64_t bits) {
    value_ = appended(value_, bits);
  }

  static constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t value_ = 0xcbf29ce484222325;
};

} // namespace fsdp::shm
