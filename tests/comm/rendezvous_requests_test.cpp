#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/rendezvous.h"

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

/// What one rank asks of the store.
class CountingStore final : public c10d::PrefixStore {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store) : PrefixStore("counted", std::move(store)) {}

  void set(const std::string& key, const Bytes& value) override {
    count(1);
    PrefixStore::set(key, value);
  }
  Bytes get(const std::string& key) override {
    count(1);
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    count(1);
    return PrefixStore::add(key, value);
  }
  bool check(const Keys& keys) override {
    count(keys.size());
    return PrefixStore::check(keys);
  }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    count(keys.size());
    PrefixStore::wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    count(1);
    PrefixStore::append(key, value);
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    count(keys.size());
    return PrefixStore::multiGet(keys);
  }

  std::atomic<size_t> requests{0};
  std::atomic<size_t> keys{0};

 private:
  void count(size_t so_many) {
    ++requests;
    keys += so_many;
  }
};

struct Rank {
  explicit Rank(const c10::intrusive_ptr<c10d::Store>& all) : store(c10::make_intrusive<CountingStore>(all)) {}

  c10::intrusive_ptr<CountingStore> store;
  std::thread thread;
};

/// Ranks that are threads, at one store. The last comes once `others_wait` says so.
std::vector<std::unique_ptr<Rank>> meet(
    int size, int exchanges, const std::function<void(const std::vector<std::unique_ptr<Rank>>&)>& others_wait) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<Rank>(shared));
  }
  for (int rank = 0; rank < size; ++rank) {
    if (rank == size - 1) {
      others_wait(ranks);
    }
    ranks[rank]->thread = std::thread([rank, size, exchanges, store = ranks[rank]->store] {
      Launch launch;
      launch.rank = rank;
      launch.size = size;
      Rendezvous rendezvous(launch, seconds(60), store);
      for (int i = 0; i < exchanges; ++i) {
        EXPECT_EQ(rendezvous.exchange(std::to_string(rank)).back(), std::to_string(size - 1));
      }
      rendezvous.leave(seconds(20));
    });
  }
  for (const auto& rank : ranks) {
    rank->thread.join();
  }
  return ranks;
}

void nobody_waits(const std::vector<std::unique_ptr<Rank>>&) {}

TEST(RendezvousRequests, OfARankAreAsManyHoweverManyRanksThereAre) {
  constexpr size_t kArrival = 20;
  constexpr size_t kExchange = 10;
  constexpr size_t kSecond = 6; // those that wait look whether the others live
  for (const int size : {2, 8, 32}) {
    const auto start = std::chrono::steady_clock::now();
    const auto ranks = meet(size, 5, nobody_waits);
    const auto seconds = std::chrono::ceil<std::chrono::seconds>(std::chrono::steady_clock::now() - start).count();
    const size_t looks = kSecond * static_cast<size_t>(seconds - 1); // the first is in what follows
    for (const auto& rank : ranks) {
      EXPECT_LE(rank->store->requests, kArrival + 5 * kExchange + looks) << size;
      EXPECT_LE(rank->store->keys, kArrival + 5 * (kExchange + size) + looks) << "what each rank said is read once";
    }
  }
}

// Also those with which a rank looks again and again whether the others live.
TEST(RendezvousRequests, OfARankThatWaitsNameOneKeyEach) {
  const auto until_the_first_has_looked_twice = [](const auto& ranks) {
    while (ranks[0]->store->requests < 18) {
      std::this_thread::sleep_for(milliseconds(10));
    }
  };
  for (const auto& rank : meet(12, 0, until_the_first_has_looked_twice)) {
    EXPECT_EQ(rank->store->keys, rank->store->requests);
  }
}

} // namespace
} // namespace fsdp::testing
