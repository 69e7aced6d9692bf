#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fsdp/error.h>
#include <fsdp/group.h>

#include "base/env.h"
#include "base/this_process.h"
#include "comm/c10d/buffer_pool.h"
#include "comm/c10d/collectives.h"
#include "comm/c10d/notice_board.h"
#include "comm/c10d/order_check.h"
#include "comm/words.h"

namespace fsdp::adapter {

class Channel;

/// A collective that was started and has to be waited for once. Move only.
class Pending {
 public:
  Pending() = default;
  Pending(std::shared_ptr<Channel> channel, CollectiveId id, c10::Device device, Works works);

  /// True when `finish` would not block.
  bool done() const;
  /// Waits for the result on the current stream; throws `CommError`. Does nothing the second time.
  void finish();
  /// Work queued on the current stream from now on comes after the collective; the host waits only if that is where it
  /// runs.
  void block_current_stream();

 private:
  void wait_for_works();

  std::shared_ptr<Channel> channel_; // null once finished
  CollectiveId id_;
  c10::Device device_ = c10::kCPU;
  Works works_;
};

/// A c10d process group with our timeouts and our errors, shared by a group and its homes and works. Once a collective
/// failed, all later ones fail at once with the same reason. Not thread safe.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  /// `ours`: ended by us.
  Channel(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::chrono::milliseconds timeout, bool ours);
  ~Channel();

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const {
    return process_group_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  BufferPool& pool() {
    return pool_;
  }

  /// Where tensors for small messages have to lie.
  c10::Device control_device() const {
    return control_device_;
  }
  /// Error unless the backend can send from `device`.
  void require_device(c10::Device device, const Label& label) const;

  /// Starts a collective; `bytes` is what all ranks have to agree on.
  using Start = std::function<Works(Collectives&)>;
  Pending start(const Label& label, const char* collective, c10::Device device, int64_t bytes, const Start& start);
  void run(const Label& label, const char* collective, c10::Device device, int64_t bytes, const Start& start);
  /// For who has made the host wait for a device: it does so also until what runs there is broken off. Throws if that
  /// is why it ended.
  void require_unbroken(const Label& label, const char* collective);

  /// What `work` returns. What it throws is an error of the group's, which the other ranks hear of, unless it is an
  /// `Error` already.
  template <typename Function>
  auto guarded(const Label& label, const char* collective, Function&& work) -> decltype(work()) {
    return guarded(CollectiveId{label, collective, started_}, std::forward<Function>(work));
  }

  /// Whose connections these are.
  pid_t process() const {
    return process_;
  }
  /// Whether this is a forked child of that process.
  bool inherited() const {
    return process_ != this_process();
  }
  void require_own(const Label& label) const;

  /// Marks the channel failed and tells the other ranks.
  void abort(const std::string& reason);

 private:
  friend class Pending;

  template <typename Function>
  auto guarded(const CollectiveId& id, Function&& work) -> decltype(work()) {
    try {
      return work();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail_and_ask(id, message_of(error));
    }
  }
  /// Also if the backend found, since, that a collective failed on the device.
  void throw_if_failed(const CollectiveId& id);
  void end_in_order();
  void check_order(const CollectiveId& id, int64_t bytes);
  void compare_orders(const CollectiveId& id);
  void wait(c10d::Work& work, const CollectiveId& id, c10::Device device);
  void wait_on_host(c10d::Work& work, const CollectiveId& id);
  [[noreturn]] void fail(const CollectiveId& id, const std::string& reason);
  [[noreturn]] void fail_and_ask(const CollectiveId& id, const std::string& reason);
  std::string describe(const CollectiveId& id) const;

  const pid_t process_ = this_process();
  c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  int rank_;
  int size_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  c10::Device control_device_;
  Collectives collectives_;
  BufferPool pool_;
  NoticeBoard board_;
  const std::optional<bool> check_order_ = env::flag("FSDP_CHECK_ORDER"); // before each collective; unset: at first
  OrderRecords order_records_;
  bool reports_errors_; // the backend does
  bool ours_;
  int64_t started_ = 0; // collectives so far
  std::string failure_; // empty while all is well
};

/// For errors: "gloo", "nccl", ..., or "c10d" for what has no name of its own.
std::string backend_name(const c10d::ProcessGroup& process_group);
/// Where a process group wants its tensors: its device other than the CPU if it has one.
c10::Device training_device(const c10d::ProcessGroup& process_group);

} // namespace fsdp::adapter
