#include "comm/rendezvous.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/check.h"
#include "base/format.h"
#include "comm/process.h"
#include "comm/within_limit.h"

namespace fsdp {
namespace {

constexpr std::chrono::milliseconds kServersGrace{1000};
// How long a rank waits before it looks whether the others still live.
constexpr std::chrono::milliseconds kSlice{1000};
constexpr std::chrono::milliseconds kAtOnce{1};
constexpr std::chrono::milliseconds kPoll{20};
constexpr const char* kGivenUp = "given up";

using Clock = std::chrono::steady_clock;
using Store = c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;

std::string text_of(const std::exception& error) {
  const auto* from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 ? from_c10->what_without_backtrace() : error.what();
}

double in_seconds(std::chrono::milliseconds time) {
  return static_cast<double>(time.count()) / 1000;
}

std::string key(const std::string& what, int rank) {
  return c10::str(what, "/", rank);
}

std::vector<std::string> keys(const std::string& what, int size) {
  std::vector<std::string> all;
  for (int rank = 0; rank < size; ++rank) {
    all.push_back(key(what, rank));
  }
  return all;
}

[[noreturn]] void cannot_connect(const Launch& launch, std::chrono::milliseconds timeout, const std::exception& error) {
  const bool serves = launch.rank == 0 && !launch.agent_store;
  const std::string place = c10::str(launch.address, ":", launch.port);
  throw CommError(
      serves ? c10::str(
                   "[init] rank 0 expected to serve the rendezvous at ",
                   place,
                   ": ",
                   text_of(error),
                   "; choose a free MASTER_PORT, and a MASTER_ADDR that is this host")
             : c10::str(
                   "[init] rank ",
                   launch.rank,
                   " expected to reach the rendezvous at ",
                   place,
                   " within ",
                   in_seconds(timeout),
                   " s: ",
                   text_of(error),
                   "; see whether rank 0 runs, and whether MASTER_ADDR and MASTER_PORT are its"));
}

StorePtr open_store(const Launch& launch, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.rank == 0 && !launch.agent_store;
  options.waitWorkers = false; // we wait ourselves, to name who is missing
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(launch.address, options);
  } catch (const std::exception& error) {
    cannot_connect(launch, timeout, error);
  }
}

/// The store of an address stays open as long as the process: a rank that comes back after `leave` must not find the
/// server of before about to close. Never destroyed, so that its server outlives whatever runs at exit.
StorePtr connect(const Launch& launch, std::chrono::milliseconds timeout) {
  static auto* const open = new std::map<std::string, StorePtr>();
  StorePtr& store = (*open)[c10::str(launch.address, ":", launch.port, ":", launch.rank)];
  if (!store) {
    store = open_store(launch, timeout);
  }
  return store;
}

/// Starts that use the same store one after another do not see each other's keys: restarts by the launcher, and later
/// rendezvous of this process.
std::string fresh_prefix(const Launch& launch) {
  static int count = 0;
  return c10::str("libfsdp/", launch.attempt, "/", count++);
}

/// Even what should be answered at once is not if the server was stopped.
std::string answer_of(std::chrono::milliseconds limit, std::function<std::string()> talk) {
  auto answer = within_limit(limit, std::move(talk));
  if (!answer) {
    throw CommError("the rendezvous does not answer");
  }
  return *std::move(answer);
}

std::string have(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", join(ranks), ranks.size() == 1 ? " has" : " have");
}

/// "rank 1 has", "ranks 1, 2 have"
std::string missing(Store& store, const std::vector<std::string>& keys) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (!store.check({keys[rank]})) {
      ranks.push_back(static_cast<int>(rank));
    }
  }
  return have(ranks);
}

/// Who has come, and can be watched from here.
std::string witnesses_key() {
  return "processes/" + process_space();
}

std::string witness_of(int rank) {
  return c10::str(rank, ' ', getpid(), ' ', process_start(getpid()).value_or(0), '\n');
}

/// It takes one question, however many ranks there are.
std::vector<int> dead_ranks(Store& store) {
  std::istringstream text(store.get_to_str(witnesses_key()));
  std::vector<int> ranks;
  int rank = 0;
  int32_t pid = 0;
  for (uint64_t start = 0; text >> rank >> pid >> start;) {
    if (has_ended(pid, start)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

/// "rank 1 has died", or nothing.
std::string deaths(Store& store) {
  const auto ranks = dead_ranks(store);
  return ranks.empty() ? "" : have(ranks) + " died";
}

/// Whether all who have come, and live, know that the ranks will not meet.
bool all_know(Store& store, int size) {
  const auto dead = dead_ranks(store);
  for (int rank = 0; rank < size; ++rank) {
    const bool lives = std::find(dead.begin(), dead.end(), rank) == dead.end();
    if (lives && store.check({key("arrived", rank)}) && !store.check({key("knows", rank)})) {
      return false;
    }
  }
  return true;
}

/// Why the ranks will not meet, if that is known already.
std::string failure(Store& store) {
  return store.check({kGivenUp}) ? store.get_to_str(kGivenUp) : deaths(store);
}

} // namespace

Rendezvous::Rendezvous(const Launch& launch, std::chrono::milliseconds timeout)
    : launch_(launch),
      timeout_(timeout),
      store_(c10::make_intrusive<c10d::PrefixStore>(fresh_prefix(launch), connect(launch, timeout))) {
  arrive();
}

Rendezvous::~Rendezvous() = default;

bool Rendezvous::serves() const {
  return launch_.rank == 0 && !launch_.agent_store;
}

// Who serves the others gives up last, or they would only see that it is gone.
std::chrono::milliseconds Rendezvous::limit() const {
  return serves() ? timeout_ + kServersGrace : timeout_;
}

std::string Rendezvous::ask(std::function<std::string()> talk) const {
  try {
    return answer_of(limit(), std::move(talk));
  } catch (const std::exception& error) {
    fail(text_of(error));
  }
}

void Rendezvous::arrive() {
  const std::string count =
      ask([store = store_, mine = key("arrived", launch_.rank)] { return std::to_string(store->add(mine, 1)); });
  FSDP_CHECK(
      count == "1",
      "[init] expected one process of rank ",
      launch_.rank,
      ", but ",
      count,
      " came to ",
      launch_.address,
      ":",
      launch_.port,
      "; give every process a rank of its own, and every job a MASTER_PORT of its own");
  ask([store = store_, mine = witness_of(launch_.rank)] {
    store->append(witnesses_key(), {mine.begin(), mine.end()});
    return std::string();
  });
  wait_for("arrived");
}

void Rendezvous::wait_for(const std::string& what) {
  const auto end = Clock::now() + limit();
  while (!all_have(what, std::min(kSlice, limit()))) {
    const auto failed = ask([store = store_] { return failure(*store); });
    if (!failed.empty() && !all_have(what, kAtOnce)) {
      fail(failed);
    }
    if (Clock::now() >= end) {
      const auto late = ask([store = store_, all = keys(what, launch_.size)] { return missing(*store, all); });
      fail(c10::str(late, " not ", what, " after ", in_seconds(timeout_), " s"));
    }
  }
}

bool Rendezvous::all_have(const std::string& what, std::chrono::milliseconds within) const {
  const auto all = keys(what, launch_.size);
  std::string reason;
  try {
    answer_of(within + limit(), [store = store_, all, within] {
      store->wait(all, within);
      return std::string();
    });
    return true;
  } catch (const std::exception& error) {
    reason = text_of(error);
  }
  try {
    return answer_of(kServersGrace, [store = store_, all] { return std::string(store->check(all) ? "yes" : "no"); }) ==
           "yes";
  } catch (const std::exception&) {
    fail(reason); // not late: the store itself is gone, and what was said first is all there is
  }
}

void Rendezvous::fail(const std::string& reason) const {
  try {
    answer_of(kServersGrace, [store = store_, mine = key("knows", launch_.rank), reason] {
      store->set(kGivenUp, reason); // so that the others do not find this rank dead, but know why
      store->set(mine, "1");
      return std::string();
    });
    if (serves()) {
      outlast_others();
    }
  } catch (const std::exception&) {
    // The others will find out by themselves.
  }
  throw CommError(c10::str(
      "[init] rank ",
      launch_.rank,
      " expected ",
      launch_.size,
      " ranks at ",
      launch_.address,
      ":",
      launch_.port,
      ": ",
      reason,
      "; see whether all of them were started and what they printed, rank 0 first, which serves the others"));
}

// They look once in a slice, and would only see that the store is gone.
void Rendezvous::outlast_others() const {
  const auto end = Clock::now() + kSlice + kServersGrace;
  const auto known = [this] {
    return answer_of(kServersGrace, [store = store_, size = launch_.size] {
      return std::string(all_know(*store, size) ? "yes" : "no");
    });
  };
  while (Clock::now() < end && known() == "no") {
    std::this_thread::sleep_for(kPoll);
  }
}

std::vector<std::string> Rendezvous::exchange(const std::string& mine) {
  const std::string round = c10::str("exchange/", exchanges_++);
  ask([store = store_, key = key(round, launch_.rank), mine] {
    store->set(key, mine);
    return std::string();
  });
  wait_for(round);
  const auto all = std::make_shared<std::vector<std::string>>();
  ask([store = store_, names = keys(round, launch_.size), all] { // one question, however many ranks there are
    for (const auto& bytes : store->multiGet(names)) {
      all->emplace_back(bytes.begin(), bytes.end());
    }
    return std::string();
  });
  return *all;
}

StorePtr Rendezvous::store(const std::string& name) const {
  return c10::make_intrusive<c10d::PrefixStore>(name, store_);
}

void Rendezvous::leave(std::chrono::milliseconds limit) {
  const auto talk =
      [store = store_, mine = key("left", launch_.rank), all = keys("left", launch_.size), serves = serves(), limit] {
        store->set(mine, "1");
        if (serves) {
          store->wait(all, limit);
        }
        return std::string();
      };
  try {
    within_limit(limit + kServersGrace, talk);
  } catch (const std::exception&) {
    // Whoever is still there finds the store gone and says so; leaving itself never fails.
  }
}

} // namespace fsdp
