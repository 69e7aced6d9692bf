#pragma once

#include <atomic>
#include <cstdint>
#include <string>

/// A record of what this process does and waits for, in the trace format that Perfetto and Chrome read. Times are those
/// of the wall clock, so that the files of several ranks lie on one axis. Thread safe.
///
/// [Note: cost of tracing] Off, a span is one relaxed load and one branch. On, it is two readings of the clock and a
/// line of text in memory; the file is written when a step ends.
namespace fsdp::tracing {

namespace detail {
inline std::atomic<bool> on{false};
} // namespace detail

inline bool on() {
  return detail::on.load(std::memory_order_relaxed);
}

/// Starts to record. The rank goes before the file's ending: "trace.json" becomes "trace.rank0.json". An Error if the
/// file cannot be written or another record is being made.
void start(const std::string& file);
/// As FSDP_TRACE says. The second call does nothing.
void start_if_asked();
/// Completes the file. Done at exit too.
void stop();
/// What was recorded so far is in the file when it returns: nothing is lost if the process is killed later.
void flush();

/// What the calling thread does from here to the end of the scope.
class Span {
 public:
  static constexpr int kNoPeer = -1;

  /// `operation`: a literal. `unit`: whose, or empty; read at the end.
  Span(const char* operation, const std::string& unit, int peer = kNoPeer)
      : operation_(on() ? operation : nullptr), unit_(&unit), peer_(peer), begin_(operation_ != nullptr ? now() : 0) {}
  Span(const char* operation, std::string&& unit, int peer = kNoPeer) = delete; // it would be gone at the end
  ~Span() {
    if (operation_ != nullptr) {
      record();
    }
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  static int64_t now();
  void record() const;

  const char* operation_; // null: not recorded
  const std::string* unit_;
  int peer_; // the rank waited for
  int64_t begin_; // nanoseconds
};

/// The bytes that this rank pays, from now on.
struct Memory {
  int64_t whole; ///< for whole parameters
  int64_t gradients; ///< for gradients that arrive or are being reduced
  int64_t bound; ///< the most that both together may take
};
void record_memory(const Memory& memory);

} // namespace fsdp::tracing
