#include "comm/rendezvous_store.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/check.h"
#include "comm/port_file.h"
#include "comm/within_limit.h"
#include "comm/words.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

// The store has the same timeout, and knows better what it waited for.
constexpr milliseconds kGrace{1000};
constexpr milliseconds kPoll{20};
constexpr milliseconds kTry{2000};
constexpr const char* kJob = "libfsdp/job";

StorePtr open_tcp(const Launch& launch, const c10d::TCPStoreOptions& options) {
  return answer_of<StorePtr>(options.timeout + kGrace, [address = launch.address, options] {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  });
}

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

/// Listens on the loopback alone, if the address is the loopback's on every host: by its spelling, as names may be
/// resolved to it on the host that they name, and to another address elsewhere. Port 0 is one that the kernel chooses.
/// The caller owns the descriptor.
std::optional<int> listen_if_loopback(const std::string& text, uint16_t port) {
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
  return descriptor;
}

/// Ranks that are told the loopback are all on this host, so nobody else is listened to. The server takes over the
/// socket.
StorePtr serve(const Launch& launch, c10d::TCPStoreOptions options) {
  options.isServer = true;
  if (const auto listening = listen_if_loopback(launch.address, launch.port)) {
    options.port = port_of(*listening);
    options.masterListenFd = *listening;
  }
  const auto store = open_tcp(launch, options);
  store->set(kJob, launch.job);
  return store;
}

uint16_t wait_for_port(const std::string& job, milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  while (Clock::now() < end) {
    if (const auto port = published_port(job)) {
      return *port;
    }
    std::this_thread::sleep_for(kPoll);
  }
  TORCH_CHECK(
      false,
      "rank 0 has not said in ",
      port_file(job).string(),
      " which port it has; set MASTER_PORT if ranks of one host do not share that folder");
}

/// The port may be that of an earlier start, whose rank 0 was killed.
StorePtr reach_published(const Launch& launch, c10d::TCPStoreOptions options) {
  const auto timeout = options.timeout;
  const auto end = Clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now());
    options.port = wait_for_port(launch.job, left);
    options.timeout = std::min(left, kTry);
    try {
      return open_tcp(launch, options);
    } catch (const std::exception&) {
      if (left <= kTry) {
        throw;
      }
    }
  }
}

StorePtr reach(const Launch& launch, const c10d::TCPStoreOptions& options) {
  const auto store = launch.port == 0 ? reach_published(launch, options) : open_tcp(launch, options);
  if (launch.agent_store) { // which another job cannot have come to
    return store;
  }
  const auto theirs = answer_of<std::string>(options.timeout + kGrace, [store] { return store->get_to_str(kJob); });
  FSDP_CHECK(
      theirs == launch.job,
      "[init] rank {} of job '{}' expected its own rendezvous at {}, but rank 0 of job '{}' serves there; give every "
      "job a MASTER_PORT of its own",
      launch.rank,
      launch.job,
      place_of(launch),
      theirs);
  return store;
}

[[noreturn]] void cannot_connect(const Launch& launch, milliseconds timeout, const std::exception& error) {
  const bool serves = serves_rendezvous(launch);
  throw CommError(phrase(
      "[init] rank {}{}{}{}: {}{}",
      launch.rank,
      serves ? " expected to serve the rendezvous at " : " expected to reach the rendezvous at ",
      place_of(launch),
      serves ? "" : " within " + in_seconds(timeout),
      message_of(error),
      serves ? "; choose a free MASTER_PORT, and a MASTER_ADDR that is this host"
             : "; see whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are its"));
}

StorePtr open_store(const Launch& launch, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.waitWorkers = false; // we wait ourselves, to name who is missing
  options.timeout = timeout;
  return serves_rendezvous(launch) ? serve(launch, options) : reach(launch, options);
}

} // namespace

bool serves_rendezvous(const Launch& launch) {
  return launch.rank == 0 && !launch.agent_store;
}

std::string place_of(const Launch& launch) {
  return launch.port == 0 ? launch.address + " (a port that rank 0 chooses)"
                          : phrase("{}:{}", launch.address, launch.port);
}

/// A rank that comes back after `leave` must not find the server of before about to close. Never destroyed, so that its
/// server outlives whatever runs at exit. A forked child has its own.
StorePtr connect_to_rendezvous(const Launch& launch, milliseconds timeout) {
  static auto* const open = new std::map<std::string, StorePtr>();
  StorePtr& store = (*open)[phrase("{}:{}:{}:{}", launch.address, launch.port, launch.rank, getpid())];
  try {
    if (!store) {
      store = open_store(launch, timeout);
    }
    if (serves_rendezvous(launch) && launch.port == 0) { // anew where ranks could not meet, and the port was withdrawn
      publish_port(launch.job, c10::static_intrusive_pointer_cast<c10d::TCPStore>(store)->getPort());
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    cannot_connect(launch, timeout, error);
  }
  store->setTimeout(timeout);
  return store;
}

} // namespace fsdp
