#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

/// When a process was started, in ticks since boot; nothing once it has ended (also while nobody has collected it).
std::optional<uint64_t> process_start(int32_t pid);

/// Whether the process of this number and start has ended; no, where that cannot be found out.
bool has_ended(int32_t pid, uint64_t started);

/// The nearest ancestor that is a launcher of MPI, or was not started with all of these in its environment
/// ("NAME=value"): who gave them to this process, whatever wrappers stand between. Nothing where that cannot be seen.
std::optional<int32_t> giver_of(const std::vector<std::string>& assignments);

/// A process that is watched: whether it has ended costs one call of the system, where that can hand out a descriptor
/// of it (pidfd), and none is left to anyone else. Thread safe.
class WatchedProcess {
 public:
  /// The same for all who ask while one of them keeps it.
  static std::shared_ptr<const WatchedProcess> of(int32_t pid, uint64_t started);
  WatchedProcess(int32_t pid, uint64_t started);
  ~WatchedProcess();
  WatchedProcess(const WatchedProcess&) = delete;
  WatchedProcess& operator=(const WatchedProcess&) = delete;

  bool ended() const;

 private:
  int32_t pid_;
  uint64_t started_;
  int descriptor_; // negative: the system has none for us
};

/// The same for all processes of one running host, and for no other.
std::string host_identity();
/// Where process numbers mean the same as here: the host and the pid namespace.
std::string process_space();

/// How often a rank that waits for another one of so many on this host looks again before it sleeps.
int looks_before_sleep(int ranks_on_host);

} // namespace fsdp
