#pragma once

#include <cstdint>
#include <string_view>

#include <fsdp/group.h>

namespace fsdp::shm {

/// A number that differs when ranks call different collectives (FNV-1a over what they were called with).
class Fingerprint {
 public:
  Fingerprint(std::string_view kind, const Label& label) {
    add(kind).add(label.operation).add(label.unit);
  }

  Fingerprint& add(std::string_view text) {
    for (const char c : text) {
      mix(static_cast<unsigned char>(c));
    }
    return add(text.size());
  }
  Fingerprint& add(uint64_t number) {
    mix(number);
    mix(number >> 32);
    return *this;
  }
  uint64_t value() const {
    return value_;
  }

 private:
  void mix(uint64_t bits) {
    value_ = (value_ ^ bits) * 0x100000001b3;
  }

  uint64_t value_ = 0xcbf29ce484222325;
};

} // namespace fsdp::shm
