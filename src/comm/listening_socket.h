#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

/// Whether the address is the loopback's on every host: by its spelling, as names may be resolved to it on the host
/// that they name, and to another address elsewhere.
bool is_loopback(const std::string& address);

struct ListeningSocket {
  int descriptor;
  uint16_t port;
};

/// Listens on the loopback alone; port 0 is one that the kernel chooses. The caller owns the descriptor.
ListeningSocket listen_on_loopback(const std::string& address, uint16_t port);

} // namespace fsdp
