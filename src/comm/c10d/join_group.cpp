#include "comm/c10d/factory.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/check.h"
#include "comm/c10d/notice_board.h"
#include "comm/within_limit.h"
#include "comm/words.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The backend has the same timeout and knows better what it waited for.
constexpr milliseconds kGrace{1000};
constexpr milliseconds kSlice{250};
constexpr milliseconds kShortSlice{20};
constexpr milliseconds kPause{10};

/// A store whose waits leave it free for others in between, and so for the news that the group will not be made: a
/// client of a TCPStore does one thing at a time, and who asks again at once is served before those that wait.
class SlicedStore final : public c10d::PrefixStore {
 public:
  SlicedStore(StorePtr store, milliseconds timeout) : PrefixStore("group", std::move(store)) {
    timeout_ = timeout;
  }

  const milliseconds& getTimeout() const noexcept override {
    return timeout_;
  }
  void setTimeout(const milliseconds& timeout) override {
    timeout_ = timeout;
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key}, timeout_);
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
  }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (milliseconds slice = kShortSlice; !has(keys, slice); slice = kSlice) {
      TORCH_CHECK(Clock::now() < deadline, "the other ranks did not come within ", in_seconds(timeout));
      std::this_thread::sleep_for(kPause);
    }
  }

 private:
  bool has(const std::vector<std::string>& keys, milliseconds slice) {
    try {
      PrefixStore::wait(keys, slice);
      return true;
    } catch (const std::exception&) {
      return PrefixStore::check(keys); // throws too if the store is gone
    }
  }
};

/// Returns on all ranks once all have called it.
void meet(c10d::Store& store, int size) {
  if (store.add("joined", 1) == size) {
    store.set("all joined", "1");
  }
  store.wait({"all joined"});
}

std::future<ProcessGroupPtr> start_making(const MakeProcessGroup& make, const StorePtr& store, const Joining& joining) {
  return made_in_background<ProcessGroupPtr>([make, store, rank = joining.rank, size = joining.size] {
    ProcessGroupPtr made = make(store, rank, size);
    meet(*store, size);
    return made;
  });
}

/// Waits for it, and hears of the other ranks. Throws whatever went wrong.
ProcessGroupPtr await(std::future<ProcessGroupPtr> made, milliseconds timeout, adapter::NoticeBoard& board) {
  const auto deadline = Clock::now() + timeout + std::min(kGrace, timeout / 2);
  while (made.wait_for(std::min(kSlice, timeout / 4)) != std::future_status::ready) {
    if (const auto reason = board.heard()) {
      fail("{}", *reason);
    }
    if (Clock::now() >= deadline) {
      fail("it took longer than {}", in_seconds(timeout));
    }
    board.wait_at(adapter::NoticeBoard::joining());
  }
  return made.get();
}

} // namespace

ProcessGroupPtr join_group(const MakeProcessGroup& make, const Joining& joining) {
  const StorePtr store = c10::make_intrusive<SlicedStore>(joining.store, joining.timeout);
  adapter::NoticeBoard board(store, joining.rank, joining.size);
  try {
    return await(start_making(make, store, joining), joining.timeout, board);
  } catch (const std::exception& error) {
    const auto reason = message_of(error);
    const auto others = board.ask(adapter::NoticeBoard::joining());
    const bool is_told = others.empty() || reason.find(others) != std::string::npos;
    const auto message = phrase(
        "[{}] rank {} of {} could not make the {} group{}: {}{}",
        joining.label.operation,
        joining.rank,
        joining.size,
        joining.backend,
        joining.label.unit.empty() ? "" : " for '" + joining.label.unit + "'",
        reason,
        is_told ? "" : "; " + others);
    board.announce(message);
    throw CommError(message);
  }
}

} // namespace fsdp
