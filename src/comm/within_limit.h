#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

namespace fsdp {

/// Runs `talk` on a thread of its own and returns what it said, or throws what it threw; nothing if it does not come
/// back within `limit`. For talk with a store: its server may have stopped, and then most calls wait for ever. The
/// thread may outlive the caller, so `talk` owns what it uses.
std::optional<std::string> within_limit(std::chrono::milliseconds limit, std::function<std::string()> talk);

} // namespace fsdp
