#include "comm/c10d/channel.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/check.h"
#include "base/format.h"
#include "base/log.h"
#include "base/tracing.h"
#include "comm/errands.h"
#include "comm/within_limit.h"

namespace fsdp::adapter {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The backend has the same timeout and knows better what it waited for, so it gets the chance to say so first.
constexpr milliseconds kMostGrace{1000};
// Longer waits are told to the other ranks, and interrupted when one of them gives up.
constexpr milliseconds kSlice{1000};
constexpr milliseconds kLongestEnd{2000};
constexpr std::chrono::microseconds kNap{200};
// Ranks whose programs differ mostly do so from the first step on. A count, which is the same on all ranks, decides:
// what a rank has learned of its steps is its own.
constexpr int64_t kCheckedAtFirst = 512;

c10::Device with_index(c10::Device device) {
  return device.is_cpu() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

bool serves(const c10d::ProcessGroup& group, c10::DeviceType type) {
  const auto devices = group.getDeviceTypes();
  // A process group written in Python registers no backends; it may serve anything.
  return devices.empty() || std::any_of(devices.begin(), devices.end(), [&](auto d) { return d.type() == type; });
}

c10::Device find_control_device(const c10d::ProcessGroup& group) {
  return serves(group, c10::kCPU) ? c10::Device(c10::kCPU) : with_index(group.getDeviceTypes().front());
}

bool ended_well(c10d::Work& work) {
  try {
    work.wait(milliseconds(1)); // it has ended: returns or throws at once
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool has_ended(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {
    return true; // badly, as who waits for it is told
  }
}

// Ranks that this one waits for may wait for its part of what was begun in groups of shared memory.
void do_errands_during(c10d::Work& work, Clock::time_point end) {
  while (Errands::advance_all() && !has_ended(work) && Clock::now() < end) {
    std::this_thread::sleep_for(kNap);
  }
}

/// What the backend found while nobody waited; nothing from those that do not look.
std::optional<c10d::ErrorType> error_of(const c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getError();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

} // namespace

std::string backend_name(const c10d::ProcessGroup& group) {
  const std::string name = group.getBackendName();
  return name == "undefined" || name == "custom" ? "c10d" : name;
}

c10::Device training_device(const c10d::ProcessGroup& process_group) {
  for (const c10::Device device : process_group.getDeviceTypes()) {
    // Gloo says that it serves CUDA also where there is none.
    if (!device.is_cpu() && c10::impl::hasDeviceGuardImpl(device.type()) &&
        c10::impl::VirtualGuardImpl(device.type()).deviceCount() > 0) {
      return with_index(device);
    }
  }
  return c10::kCPU;
}

Pending::Pending(std::shared_ptr<Channel> channel, CollectiveId id, c10::Device device, Works works)
    : channel_(std::move(channel)), id_(std::move(id)), device_(device), works_(std::move(works)) {}

bool Pending::done() const {
  Errands::advance_all(); // who only asks must not hold up others
  return !channel_ || channel_->inherited() ||
         std::all_of(works_.begin(), works_.end(), [](const auto& work) { return has_ended(*work); });
}

void Pending::finish() {
  if (channel_) {
    wait_for_works();
    works_.clear();
    channel_.reset(); // not before: who waits again after an error is told again
  }
}

void Pending::block_current_stream() {
  if (device_.is_cpu()) {
    finish();
  } else if (channel_) {
    wait_for_works();
  }
}

void Pending::wait_for_works() {
  channel_->throw_if_failed(id_);
  for (const auto& work : works_) {
    channel_->wait(*work, id_, device_);
  }
}

Channel::Channel(c10::intrusive_ptr<c10d::ProcessGroup> process_group, milliseconds timeout, bool ours)
    : process_group_(std::move(process_group)),
      rank_(process_group_->getRank()),
      size_(process_group_->getSize()),
      name_(backend_name(*process_group_)),
      timeout_(bounded(timeout)),
      control_device_(find_control_device(*process_group_)),
      collectives_(process_group_, timeout_),
      board_(process_group_->getStore(), rank_, size_),
      reports_errors_(error_of(*process_group_).has_value()),
      ours_(ours) {}

Channel::~Channel() {
  const bool goes_on = failure_.empty() && std::uncaught_exceptions() == 0;
  if (ours_ && goes_on && !control_device_.is_cpu()) {
    end_in_order();
  }
}

// NCCL's groups abort when they are just destroyed, while other ranks may still receive from this one. But those may
// never end theirs: not for long.
void Channel::end_in_order() {
  try {
    if (error_of(*process_group_).value_or(c10d::ErrorType::SUCCESS) == c10d::ErrorType::SUCCESS) {
      within_limit<bool>(kLongestEnd, [group = process_group_, device = control_device_] {
        const c10::DeviceGuard guard(device);
        group->shutdown();
        return true;
      });
    }
  } catch (const std::exception& error) {
    log::debug("the {} group did not end in order: {}", name_, message_of(error));
  }
}

void Channel::require_device(c10::Device device, const Label& label) const {
  FSDP_CHECK(
      serves(*process_group_, device.type()),
      "[{}] expected a process group that serves {}, but the {} group of this mesh serves {}; make the mesh from a "
      "group for that device, or keep the model on one of these",
      label.operation,
      device,
      name_,
      join(process_group_->getDeviceTypes()));
}

Pending Channel::start(
    const Label& label, const char* collective, c10::Device device, int64_t bytes, const Start& start) {
  const CollectiveId id{label, collective, started_++};
  throw_if_failed(id);
  return guarded(id, [&]() -> Pending {
    check_order(id, bytes);
    return {shared_from_this(), id, device, start(collectives_)};
  });
}

void Channel::run(const Label& label, const char* collective, c10::Device device, int64_t bytes, const Start& start) {
  this->start(label, collective, device, bytes, start).finish();
}

void Channel::require_unbroken(const Label& label, const char* collective) {
  throw_if_failed({label, collective, started_ - 1});
}

void Channel::check_order(const CollectiveId& id, int64_t bytes) {
  if (!check_order_.value_or(id.number < kCheckedAtFirst)) {
    return;
  }
  const at::Tensor mine = order_record(id, bytes, control_device_, check_order_);
  const at::Tensor sent = mine.to(control_device_, /*non_blocking=*/true);
  const at::Tensor received = sent.new_zeros({size_ * sent.numel()}); // which the exchange may leave so
  Pending(
      shared_from_this(),
      {id.label, "order check", id.number},
      control_device_,
      collectives_.all_gather(received, sent))
      .block_current_stream();
  order_records_.add(received, mine);
  compare_orders(id);
}

void Channel::compare_orders(const CollectiveId& id) {
  if (const auto mismatch = order_records_.find_mismatch(rank_, size_); !mismatch.empty()) {
    fail(id, mismatch);
  }
}

void Channel::wait(c10d::Work& work, const CollectiveId& id, c10::Device device) {
  if (device.is_cpu()) {
    wait_on_host(work, id);
    return;
  }
  guarded(id, [&] { work.wait(); }); // only the stream waits; the backend's own watchdog keeps the time
}

void Channel::wait_on_host(c10d::Work& work, const CollectiveId& id) {
  const tracing::Span span("wait for collective", id.label.unit);
  const auto deadline = Clock::now() + timeout_ + std::min(kMostGrace, timeout_ / 2);
  const auto longest = std::min(kSlice, timeout_ / 4);
  while (true) {
    const auto begin = Clock::now();
    const auto left = std::chrono::ceil<milliseconds>(deadline - begin);
    const auto slice = std::max(milliseconds(1), std::min(left, longest));
    do_errands_during(work, begin + slice);
    try {
      work.wait(std::max(milliseconds(1), std::chrono::ceil<milliseconds>(begin + slice - Clock::now())));
      board_.stop_listening();
      return;
    } catch (const std::exception& error) {
      // c10d throws for the end of a slice as for a failure; a failure ends the work, or comes before the slice is
      // over. Work that has ended may have ended well, only just too late for the slice.
      const bool slice_is_over = Clock::now() >= begin + slice;
      const bool ended = has_ended(work);
      if (ended && ended_well(work)) {
        board_.stop_listening();
        return;
      }
      if (ended || !slice_is_over) {
        fail_and_ask(id, message_of(error));
      }
    }
    if (const auto reason = board_.heard()) {
      fail(id, *reason);
    }
    if (Clock::now() >= deadline) {
      fail_and_ask(id, "it took longer than " + in_seconds(timeout_));
    }
    board_.wait_at({id.number, fsdp::describe(id.label)});
  }
}

std::string Channel::describe(const CollectiveId& id) const {
  const std::string unit = id.label.unit.empty() ? "" : " of unit '" + id.label.unit + "'";
  return phrase(
      "[{}] rank {} of {} could not finish the {}{} over {}",
      id.label.operation,
      rank_,
      size_,
      id.collective,
      unit,
      name_);
}

void Channel::require_own(const Label& label) const {
  FSDP_CHECK(
      !inherited(),
      "[{}] a forked child cannot take its parent's place in a group; start a process of its own (spawn)",
      label.operation);
}

void Channel::throw_if_failed(const CollectiveId& id) {
  require_own(id.label);
  if (!failure_.empty()) {
    throw CommError(phrase("{}: the group has failed before: {}{}", describe(id), failure_, kStartAgain));
  }
  compare_orders(id);
  if (reports_errors_ && error_of(*process_group_) != c10d::ErrorType::SUCCESS) {
    fail_and_ask(id, "it or an earlier collective failed, or took too long, and what was computed since is wrong");
  }
}

void Channel::fail_and_ask(const CollectiveId& id, const std::string& reason) {
  const std::string others = board_.ask({id.number, fsdp::describe(id.label)});
  fail(id, others.empty() ? reason : phrase("{}; {}", reason, others));
}

void Channel::fail(const CollectiveId& id, const std::string& reason) {
  const std::string message = phrase("{}: {}", describe(id), reason);
  abort(message);
  throw CommError(message + kStartAgain);
}

void Channel::abort(const std::string& reason) {
  if (!failure_.empty() || inherited()) {
    return;
  }
  failure_ = reason;
  board_.announce(reason);
  board_.stop_listening();
  try {
    process_group_->abort();
  } catch (const std::exception& error) {
    log::debug("the {} backend could not be aborted: {}", name_, message_of(error));
  }
}

} // namespace fsdp::adapter
