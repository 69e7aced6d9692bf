#pragma once

#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "comm/launcher.h"

namespace c10d {
class Store;
}

namespace fsdp {

/// Whether this process serves the others' store: rank 0 does, unless the launcher's agent does.
bool serves_rendezvous(const Launch& launch);
/// Where it is, for errors: "host:port".
std::string place_of(const Launch& launch);

/// The store of the job, which stays open as long as the process. A CommError tells why it was not reached within
/// `timeout`, or that it is another job's.
c10::intrusive_ptr<c10d::Store> connect_to_rendezvous(const Launch& launch, std::chrono::milliseconds timeout);

} // namespace fsdp
