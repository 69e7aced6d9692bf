#include "comm/listening_socket.h"

#include <cerrno>
#include <system_error>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace fsdp {
namespace {

union Address {
  sockaddr any;
  sockaddr_in v4;
  sockaddr_in6 v6;
};

std::optional<Address> loopback_address(const std::string& text, uint16_t port) {
  Address address{};
  if (inet_pton(AF_INET, text == "localhost" ? "127.0.0.1" : text.c_str(), &address.v4.sin_addr) == 1) {
    address.v4.sin_family = AF_INET;
    address.v4.sin_port = htons(port);
    return ntohl(address.v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET ? std::optional(address) : std::nullopt;
  }
  if (inet_pton(AF_INET6, text.c_str(), &address.v6.sin6_addr) == 1 && IN6_IS_ADDR_LOOPBACK(&address.v6.sin6_addr)) {
    address.v6.sin6_family = AF_INET6;
    address.v6.sin6_port = htons(port);
    return address;
  }
  return std::nullopt;
}

uint16_t port_of(int descriptor) {
  Address address{};
  socklen_t length = sizeof(address);
  getsockname(descriptor, &address.any, &length);
  return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}

[[noreturn]] void cannot_listen(int reason) {
  throw std::system_error(reason, std::generic_category(), "cannot listen");
}

} // namespace

std::optional<ListeningSocket> listen_if_loopback(const std::string& text, uint16_t port) {
  const auto address = loopback_address(text, port);
  if (!address) {
    return std::nullopt;
  }
  const int descriptor = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) {
    cannot_listen(errno);
  }
  const int yes = 1;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)); // what is left of an earlier job does not matter
  if (bind(descriptor, &address->any, sizeof(*address)) != 0 || listen(descriptor, SOMAXCONN) != 0) {
    const int reason = errno;
    close(descriptor);
    cannot_listen(reason);
  }
  return ListeningSocket{.descriptor = descriptor, .port = port_of(descriptor)};
}

} // namespace fsdp
