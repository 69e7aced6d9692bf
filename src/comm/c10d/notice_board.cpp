#include "comm/c10d/notice_board.h"

#include <chrono>
#include <exception>
#include <functional>
#include <system_error>
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
constexpr auto kAskersLimit = std::chrono::seconds(3);
// Plain, as background threads may read them at exit.
constexpr const char* kAborted = "aborted";
constexpr const char* kAsks = "asks";
constexpr const char* kNoStore =
    "the process that serves the rendezvous store (rank 0, or torchrun's agent) has died or cannot be reached";

std::string place_key(int rank) {
  return phrase("waits/{}", rank);
}

/// What `talk` says within the limit.
std::string hear_out(std::function<std::string()> talk) {
  try {
    return within_limit<std::string>(kAnswerLimit, std::move(talk)).value_or("");
  } catch (const std::system_error&) { // the system has no thread for it
    return "";
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

bool is_first_to_ask(c10d::Store& store, int rank) {
  const std::string text = std::to_string(rank);
  const std::vector<uint8_t> mine(text.begin(), text.end());
  try {
    return store.compareSet(kAsks, {}, mine) == mine;
  } catch (const std::exception&) { // some stores cannot
    return true;
  }
}

/// What another rank has announced, as far as is known within a moment. Null for who is to ask about each rank: when
/// all give up at once only the first does, and the others wait for its word.
std::optional<std::string> reason_of_others(c10d::Store& store, int rank) {
  if (!store.check({kAborted}) && is_first_to_ask(store, rank)) {
    return std::nullopt;
  }
  try {
    store.wait({kAborted}, kAskersLimit);
    return store.get_to_str(kAborted);
  } catch (const std::exception&) { // it has died meanwhile, say
    return "";
  }
}

/// Tells the others this rank's place, then waits for the reason of one that gives up; nothing if the wait is over
/// first.
std::string listen(
    c10d::Store& store, const std::string& key, const std::string& place, const std::shared_future<void>& over) {
  try {
    store.set(key, place);
    do {
      if (store.check({kAborted})) {
        return store.get_to_str(kAborted);
      }
    } while (over.wait_for(kPoll) != std::future_status::ready);
  } catch (const std::exception&) {
    // Who serves the store is gone, which alone is no failure: it may have ended well, and others go on without it.
  }
  return "";
}

} // namespace

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
  if (!store_ || reason_.valid()) {
    return;
  }
  over_ = {};
  const auto listening = [store = store_,
                          key = place_key(rank_),
                          text = phrase("{} {}", place.number, place.name),
                          over = over_.get_future().share()] { return listen(*store, key, text, over); };
  try {
    reason_ = made_in_background<std::string>(listening).share();
  } catch (const std::exception&) { // the system has no thread for it: who waits may listen later
  }
}

std::optional<std::string> NoticeBoard::heard() const {
  const bool listened = reason_.valid() && reason_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  return listened && !reason_.get().empty() ? std::optional(reason_.get()) : std::nullopt;
}

void NoticeBoard::stop_listening() {
  if (reason_.valid()) {
    over_.set_value();
    reason_ = {};
  }
}

std::string NoticeBoard::ask(const Place& place) const {
  if (!store_) {
    return "";
  }
  return hear_out([store = store_, rank = rank_, size = size_, place]() -> std::string {
    if (const auto reason = reason_of_others(*store, rank)) {
      return *reason;
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
