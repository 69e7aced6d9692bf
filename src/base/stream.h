#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

/// Streams and events of any device behind c10's device guards. On the CPU there is one stream, work on it is done when
/// the call returns, and everything here is a no-op, so callers need no case of their own for it.
namespace fsdp {

using c10::Stream;

/// Make a device or a stream (with its device) current for a scope, on this thread.
using c10::DeviceGuard;
using c10::StreamGuard;

/// Whether work on the device is queued on streams, or done when the call returns.
bool has_streams(c10::Device device);

/// The stream that operators of this thread are queued on.
Stream current_stream(c10::Device device);
/// Another stream of the device, from its pool; it lives as long as the process. The CPU has one stream only: that one.
Stream new_stream(c10::Device device, bool high_priority = false);

/// Work queued on `stream` from now on waits for what is queued on `earlier` so far. The host does not wait.
void wait_stream(const Stream& stream, const Stream& earlier);
/// The host waits until all work queued on `stream` is done.
void synchronize(const Stream& stream);
/// For destructors, and after errors: `body` orders what comes after memory that is given back. If it throws, the
/// device has failed, which is logged: the next call on it fails.
void order_release(const std::function<void()>& body) noexcept;

/// A point in a stream's work. Move only. Not thread safe: a thread that hands an event over makes that visible itself.
///
/// Who produces calls `record` on the stream it has queued its work on, before it announces the work; who consumes
/// calls `block` with the stream it will queue its own work on, before it does. An event that was never recorded blocks
/// nobody.
class Event {
 public:
  /// Marks the work queued on `stream` so far; forgets what was recorded before.
  void record(const Stream& stream);
  /// Work queued on `stream` from now on waits for the recorded work. The host does not wait.
  void block(const Stream& stream) const;
  /// Whether the recorded work is done; true if nothing was recorded.
  bool query() const;
  /// The host waits for the recorded work.
  void synchronize() const;

 private:
  std::optional<c10::Event> event_; // empty until recorded, and always on the CPU
};

/// The streams that have used something, each up to its last use. Move only. Not thread safe.
///
/// With one stream at work an event is recorded only by `end`. For devices with streams: callers ask `has_streams`
/// first.
class StreamUses {
 public:
  /// Work that uses it is queued on `stream`, from now until `end` or until another stream uses it. True if this stream
  /// has not used it before.
  bool begin(const Stream& stream);
  /// Whether `begin` with this stream has nothing to do.
  bool goes_on(const Stream& stream) const {
    return present_ && uses_.back().stream == stream;
  }
  /// What used it was queued before now.
  void end();
  /// Work queued on `stream` from now on comes after all uses; where one has no end yet, after what its stream has
  /// queued so far.
  void block(const Stream& stream) const;
  /// Those that have used it.
  std::vector<Stream> streams() const;
  /// Each stream that has used it comes after the uses of the others.
  void join() const;
  void clear() {
    uses_.clear();
    present_ = false;
  }

 private:
  struct Use {
    Stream stream;
    Event last; // recorded unless it is the present use
  };
  std::vector<Use> uses_;
  bool present_ = false; // the last of them has no end yet
};

} // namespace fsdp
