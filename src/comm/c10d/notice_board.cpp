#include "comm/c10d/notice_board.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/format.h"
#include "base/phrase.h"
#include "comm/within_limit.h"

namespace fsdp::adapter {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Place = NoticeBoard::Place;

constexpr auto kPoll = std::chrono::milliseconds(200);
constexpr auto kAnswerLimit = std::chrono::seconds(5);
// Plain, as background threads may read them at exit.
constexpr const char* kAborted = "aborted";
constexpr const char* kNoStore =
    "the process that serves the rendezvous store (rank 0, or torchrun's agent) has died or cannot be reached";

/// A flag that one thread raises and another waits for.
class Flag {
 public:
  void raise() {
    const std::scoped_lock lock(mutex_);
    raised_ = true;
    changed_.notify_all();
  }

  bool wait_for(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return raised_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool raised_ = false;
};

std::string place_key(int rank) {
  return phrase("waits/{}", rank);
}

/// What `talk` says within the limit.
std::string hear_out(std::function<std::string()> talk) {
  try {
    return within_limit<std::string>(kAnswerLimit, std::move(talk)).value_or("");
  } catch (const std::exception&) {
    return kNoStore;
  }
}

/// "rank 1 has not been seen at it", "rank 2 is in unshard of 'head'", or nothing for a rank that waits for the same.
std::string whereabouts(c10d::Store& store, int rank, const Place& place) {
  const std::string key = place_key(rank);
  const std::string text = store.check({key}) ? store.get_to_str(key) : "";
  const size_t space = text.find(' ');
  const int64_t number =
      space == std::string::npos ? NoticeBoard::joining().number - 1 : std::stoll(text.substr(0, space));
  const std::string name = space == std::string::npos ? "" : text.substr(space + 1);
  if (number < place.number) {
    return phrase("rank {} has not been seen at it", rank);
  }
  return name == place.name ? "" : phrase("rank {} is in {}", rank, name);
}

} // namespace

struct NoticeBoard::Listener {
  Flag stop;
  mutable std::mutex mutex;
  std::optional<std::string> reason;

  void run(const StorePtr& store, const std::string& key, const std::string& place) {
    try {
      store->set(key, place);
      do {
        if (store->check({kAborted})) {
          hear(store->get_to_str(kAborted));
          return;
        }
      } while (!stop.wait_for(kPoll));
    } catch (const std::exception&) {
      // Who serves the store is gone, which alone is no failure: it may have ended well, and others go on without it.
    }
  }

  void hear(std::string text) {
    const std::scoped_lock lock(mutex);
    reason = std::move(text);
  }
};

NoticeBoard::NoticeBoard(const StorePtr& store, int rank, int size)
    : store_(store ? c10::make_intrusive<c10d::PrefixStore>("libfsdp", store) : nullptr), rank_(rank), size_(size) {}

NoticeBoard::~NoticeBoard() {
  stop_listening();
}

void NoticeBoard::announce(const std::string& reason) {
  if (!store_ || std::exchange(announced_, true)) {
    return;
  }
  hear_out([store = store_, text = phrase("rank {} gave up: {}", rank_, reason)] {
    if (!store->check({kAborted})) {
      store->set(kAborted, text);
    }
    return "";
  });
}

void NoticeBoard::wait_at(const Place& place) {
  if (!store_ || listener_) {
    return;
  }
  listener_ = std::make_shared<Listener>();
  in_background(
      [listener = listener_, store = store_, key = place_key(rank_), text = phrase("{} {}", place.number, place.name)] {
        listener->run(store, key, text);
      });
}

std::optional<std::string> NoticeBoard::heard() const {
  if (!listener_) {
    return std::nullopt;
  }
  const std::scoped_lock lock(listener_->mutex);
  return listener_->reason;
}

void NoticeBoard::stop_listening() {
  if (listener_) {
    listener_->stop.raise();
    listener_.reset();
  }
}

std::string NoticeBoard::ask(const Place& place) const {
  if (!store_) {
    return "";
  }
  return hear_out([store = store_, rank = rank_, size = size_, place]() -> std::string {
    if (store->check({kAborted})) {
      return store->get_to_str(kAborted);
    }
    std::vector<std::string> others;
    for (int other = 0; other < size; ++other) {
      if (const auto text = other == rank ? "" : whereabouts(*store, other, place); !text.empty()) {
        others.push_back(text);
      }
    }
    return join(others);
  });
}

} // namespace fsdp::adapter
