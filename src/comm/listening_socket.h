#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

struct ListeningSocket {
  int descriptor;
  uint16_t port;
};

/// Listens on the loopback alone, if the address is the loopback's on every host: by its spelling, as names may be
/// resolved to it on the host that they name, and to another address elsewhere. Port 0 is one that the kernel chooses.
/// The caller owns the descriptor.
std::optional<ListeningSocket> listen_if_loopback(const std::string& address, uint16_t port);

} // namespace fsdp
