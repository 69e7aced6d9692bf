#include "comm/rendezvous.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/check.h"
#include "base/format.h"
#include "comm/port_file.h"
#include "comm/process.h"
#include "comm/rendezvous_store.h"
#include "comm/within_limit.h"
#include "comm/words.h"

namespace fsdp {
namespace {

constexpr std::chrono::milliseconds kServersGrace{1000};
// How long a rank waits before it looks whether the others still live.
constexpr std::chrono::milliseconds kSlice{1000};
constexpr std::chrono::milliseconds kAtOnce{1};
// Ranks that fail before they meet have mostly been started together.
constexpr std::chrono::milliseconds kRefusalLimit{10'000};
// Plain, as background threads may read them at exit.
constexpr const char* kGivenUp = "given up";
constexpr const char* kHeard = "heard";
constexpr const char* kLeft = "left";

using Clock = std::chrono::steady_clock;
using Store = c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;

std::string key(const std::string& what, int64_t number) {
  return phrase("{}/{}", what, number);
}

std::string all_key(const std::string& what) {
  return what + "/all";
}

std::string who_key(const std::string& what) {
  return what + "/who";
}

/// Of this process, which other ranks have had as many of.
int next_part() {
  static int count = 0;
  return count++;
}

/// Starts that use the same store one after another do not see each other's keys: restarts by the launcher, and later
/// rendezvous of this process.
StorePtr part_of(const Launch& launch, const StorePtr& store, int number) {
  return c10::make_intrusive<c10d::PrefixStore>(phrase("libfsdp/{}/{}/{}", launch.job, launch.attempt, number), store);
}

StorePtr enter(const Launch& launch, std::chrono::milliseconds timeout) {
  const int part = next_part(); // as the others, whether this rank reaches them or not
  return part_of(launch, connect_to_rendezvous(launch, timeout), part);
}

/// "rank 1 has", "ranks 1, 2 have"
std::string have(const std::vector<int>& ranks) {
  return phrase("{}{}{}", ranks.size() == 1 ? "rank " : "ranks ", join(ranks), ranks.size() == 1 ? " has" : " have");
}

/// The last of all says so to the others.
bool count_me(Store& store, const std::string& what, int size) {
  const bool is_last = store.add(what, 1) == size;
  if (is_last) {
    store.set(all_key(what), "1");
  }
  return is_last;
}

bool all_are_there(Store& store, const std::string& what, std::chrono::milliseconds within) {
  try {
    store.wait({all_key(what)}, within);
    return true;
  } catch (const std::exception&) {
    try {
      return store.check({all_key(what)});
    } catch (const std::exception&) {
      // Not late: the store itself is gone, and what was said first is all there is.
    }
    throw;
  }
}

std::set<int> who_came(Store& store, const std::string& what) {
  std::istringstream text(store.get_to_str(who_key(what))); // this rank's number at least
  return {std::istream_iterator<int>(text), {}};
}

std::string missing(Store& store, const std::string& what, int size) {
  const auto came = who_came(store, what);
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (came.count(rank) == 0) {
      ranks.push_back(rank);
    }
  }
  return have(ranks);
}

/// The processes that can watch each other have numbers there, and a line each.
std::string witnesses() {
  return "processes/" + process_space();
}

/// The rank of the witness, if that has died.
std::vector<int> dead_rank(Store& store, int64_t number) {
  const auto line = key(witnesses(), number);
  std::istringstream text(store.check({line}) ? store.get_to_str(line) : "");
  int rank = 0;
  int32_t pid = 0;
  uint64_t start = 0;
  const bool died = text >> rank >> pid >> start && has_ended(pid, start);
  return died ? std::vector<int>{rank} : std::vector<int>{};
}

/// Of those that each watches in turn, one in a look: the one before it first, in a circle.
bool watched_died(Store& store, int64_t mine, int64_t look) {
  const int64_t watched = mine - 1 - look;
  if (watched >= 0) {
    return !dead_rank(store, watched).empty();
  }
  const int64_t count = store.add(witnesses(), 0);
  return !dead_rank(store, (watched % count + count) % count).empty(); // this rank itself has not
}

/// Who has come may end.
std::string deaths(Store& store, const std::string& what) {
  std::set<int> dead;
  for (int64_t number = store.add(witnesses(), 0) - 1; number >= 0; --number) {
    const auto rank = dead_rank(store, number);
    dead.insert(rank.begin(), rank.end());
  }
  const auto came = who_came(store, what); // before it ended: asked for after that
  std::vector<int> ranks;
  std::set_difference(dead.begin(), dead.end(), came.begin(), came.end(), std::back_inserter(ranks));
  return ranks.empty() ? "" : have(ranks) + " died";
}

/// So that the others do not find this rank dead, but know why. They look once in a slice, and would only see that the
/// store is gone: who serves it waits for them.
void tell_why(const Launch& launch, const StorePtr& store, const std::string& reason) {
  const auto patience = serves_rendezvous(launch) ? kSlice + kServersGrace : kAtOnce;
  try {
    within_limit<bool>(kServersGrace + patience, [store, size = launch.size, reason, patience] {
      if (!store->check({kGivenUp})) { // the first reason is the cause
        store->set(kGivenUp, reason);
      }
      count_me(*store, kHeard, size);
      store->wait({all_key(kHeard)}, patience);
      return true;
    });
  } catch (const std::exception&) {
    // The others will find out by themselves.
  }
  if (serves_rendezvous(launch)) {
    withdraw_port(launch.job);
  }
}

/// Why the ranks will not meet, if that is known already. Who gives up says why before it ends: asked for last.
/// `watches_all`: else one other rank in each look, and all once that has died.
std::string failure(Store& store, int64_t witness, const std::string& what, int64_t look, bool watches_all) {
  const auto died = watches_all || watched_died(store, witness, look) ? deaths(store, what) : "";
  return store.check({kGivenUp}) ? store.get_to_str(kGivenUp) : died;
}

} // namespace

Rendezvous::Rendezvous(const Launch& launch, std::chrono::milliseconds timeout)
    : Rendezvous(launch, timeout, enter(launch, bounded(timeout))) {}

Rendezvous::Rendezvous(const Launch& launch, std::chrono::milliseconds timeout, StorePtr store)
    : launch_(launch), timeout_(bounded(timeout)), store_(std::move(store)) {
  be_seen();
  const Round arrival{.key = "arrived", .done = "arrived"};
  come_to(arrival);
  await_all(arrival);
  if (serves_rendezvous(launch_)) {
    withdraw_port(launch_.job);
  }
}

Rendezvous::~Rendezvous() = default;

// Who serves the others gives up last, or they would only see that it is gone.
std::chrono::milliseconds Rendezvous::limit() const {
  return serves_rendezvous(launch_) ? timeout_ + kServersGrace : timeout_;
}

template <typename T>
T Rendezvous::ask(std::function<T()> talk, std::chrono::milliseconds extra) {
  try {
    return answer_of<T>(limit() + extra, std::move(talk));
  } catch (const std::exception& error) {
    fail(message_of(error));
  }
}

void Rendezvous::be_seen() {
  const auto count = ask<int64_t>([store = store_, mine = key("rank", launch_.rank)] { return store->add(mine, 1); });
  FSDP_CHECK(
      count == 1,
      "[init] expected one process of rank {}, but {} came to {}; give every process a rank of its own, and every job "
      "a MASTER_PORT of its own",
      launch_.rank,
      count,
      place_of(launch_));
  witness_ = ask<int64_t>([store = store_, rank = launch_.rank] {
    const int64_t mine = store->add(witnesses(), 1) - 1;
    store->set(key(witnesses(), mine), phrase("{} {} {}", rank, getpid(), process_start(getpid()).value_or(0)));
    return mine;
  });
}

void Rendezvous::come_to(const Round& round) {
  ask<bool>([store = store_, what = round.key, mine = phrase("{} ", launch_.rank), size = launch_.size] {
    store->append(who_key(what), {mine.begin(), mine.end()});
    return count_me(*store, what, size);
  });
}

void Rendezvous::await_all(const Round& round) {
  const auto end = Clock::now() + limit();
  for (int64_t look = 0; !all_came(round, std::min(kSlice, limit())); ++look) {
    const auto failed =
        ask<std::string>([store = store_, witness = witness_, what = round.key, look, all = round.one_waits] {
          return failure(*store, witness, what, look, all);
        });
    if (!failed.empty() && !all_came(round, kAtOnce)) {
      fail(failed);
    }
    if (Clock::now() >= end) {
      const auto late = ask<std::string>(
          [store = store_, what = round.key, size = launch_.size] { return missing(*store, what, size); });
      fail(phrase("{} not {} after {}", late, round.done, in_seconds(timeout_)));
    }
  }
}

bool Rendezvous::all_came(const Round& round, std::chrono::milliseconds within) {
  return ask<bool>([store = store_, what = round.key, within] { return all_are_there(*store, what, within); }, within);
}

void Rendezvous::give_up(const std::string& reason) {
  if (!std::exchange(gave_up_, true)) {
    tell_why(launch_, store_, reason);
  }
}

void Rendezvous::fail(const std::string& reason) {
  give_up(reason);
  throw CommError(phrase(
      "[init] rank {} expected {} ranks at {}: {}; see whether all of them were started and what they printed, rank 0 "
      "first, which serves the others",
      launch_.rank,
      launch_.size,
      place_of(launch_),
      reason));
}

std::vector<std::string> Rendezvous::exchange(const std::string& mine) {
  const Round round{.key = key("exchange", exchanges_++), .done = "said what the ranks exchange"};
  ask<bool>([store = store_, key = key(round.key, launch_.rank), mine] {
    store->set(key, mine);
    return true;
  });
  come_to(round);
  await_all(round);
  const auto all = ask<std::vector<std::vector<uint8_t>>>([store = store_, round = round.key, size = launch_.size] {
    std::vector<std::string> keys; // one question, however many ranks there are
    for (int rank = 0; rank < size; ++rank) {
      keys.push_back(key(round, rank));
    }
    return store->multiGet(keys);
  });
  if (all.size() != static_cast<size_t>(launch_.size)) {
    fail(phrase("the store has {} answers for {} ranks", all.size(), launch_.size));
  }
  std::vector<std::string> texts;
  for (const auto& bytes : all) {
    texts.emplace_back(bytes.begin(), bytes.end());
  }
  return texts;
}

void Rendezvous::conclude() {
  const Round round{.key = "known", .done = "joined", .one_waits = true};
  come_to(round);
  if (serves_rendezvous(launch_)) {
    await_all(round);
  }
}

StorePtr Rendezvous::store(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(name, store_);
}

void Rendezvous::leave(std::chrono::milliseconds limit) {
  const auto talk = [store = store_, size = launch_.size, waits = serves_rendezvous(launch_), limit] {
    count_me(*store, kLeft, size);
    if (waits) {
      store->wait({all_key(kLeft)}, limit);
    }
    return true;
  };
  try {
    within_limit<bool>(limit + kServersGrace, talk);
  } catch (const std::exception&) {
    // Whoever is still there finds the store gone and says so; leaving itself never fails.
  }
}

void refuse_to_meet(const Launch& launch, std::chrono::milliseconds timeout, const std::string& reason) {
  const int part = next_part();
  try {
    const auto store = connect_to_rendezvous(launch, std::min(bounded(timeout), kRefusalLimit));
    tell_why(launch, part_of(launch, store, part), reason);
  } catch (const std::exception&) {
    // Nobody is there to be told.
  }
}

} // namespace fsdp
