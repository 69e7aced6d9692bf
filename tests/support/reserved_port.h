#pragma once

#include <cstdint>

namespace fsdp::testing {

/// A port of the loopback that nobody is given who asks for a free one, whatever else runs; but one who names it may
/// listen there.
class ReservedPort {
 public:
  ReservedPort();
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  uint16_t number() const {
    return number_;
  }

 private:
  int socket_;
  uint16_t number_ = 0;
};

} // namespace fsdp::testing
