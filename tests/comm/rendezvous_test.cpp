#include "comm/rendezvous.h"

#include <chrono>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "support/error_message.h"
#include "support/file_exchange.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Launch launch_of(int rank, int size) {
  Launch launch;
  launch.rank = rank;
  launch.size = size;
  launch.address = "127.0.0.1";
  launch.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  return launch;
}

TEST(Rendezvous, ExchangesStringsOfAllRanks) {
  on_processes(3, [] {
    Rendezvous rendezvous(launch_of(process_rank(), 3), seconds(30));
    for (const std::string round : {"a", "b"}) {
      const auto all = rendezvous.exchange(round + std::to_string(process_rank()));
      EXPECT_EQ(all, (std::vector{round + "0", round + "1", round + "2"}));
    }
    EXPECT_EQ(rendezvous.exchange("").size(), 3);
    rendezvous.leave(seconds(10));
  });
}

TEST(Rendezvous, NamesWhoIsMissing) {
  on_processes(4, [] {
    const int rank = process_rank();
    if (rank == 1 || rank == 3) {
      return;
    }
    FileExchange(process_folder(), rank / 2, 2)(""); // start together
    const std::string message = error_message([&] { Rendezvous(launch_of(rank, 4), milliseconds(3000)); });
    EXPECT_TRUE(contains(message, "expected 4 ranks")) << rank;
    EXPECT_TRUE(contains(message, "ranks 1, 3 have not arrived after 3 s")) << rank;
  });
}

TEST(Rendezvous, NoticesWhoDiesLongBeforeTheTimeout) {
  const auto body = [] {
    Rendezvous rendezvous(launch_of(process_rank(), 3), seconds(60));
    if (process_rank() == 1) {
      std::raise(SIGKILL);
    }
    const auto start = std::chrono::steady_clock::now();
    const std::string message = error_message([&] { rendezvous.exchange("a"); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(10));
    EXPECT_TRUE(contains(message, "rank 1 has died"));
  };
  on_processes(3, body, {.lost = {1}});
}

TEST(Rendezvous, SaysWhereNobodyAnswers) {
  on_processes(1, [] {
    Launch launch = launch_of(1, 2);
    const auto start = std::chrono::steady_clock::now();
    const std::string message = error_message([&] { Rendezvous(launch, milliseconds(1500)); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(20));
    EXPECT_TRUE(contains(message, "127.0.0.1:" + std::to_string(launch.port)));
    EXPECT_TRUE(contains(message, "MASTER_ADDR"));
  });
}

c10::intrusive_ptr<c10d::TCPStore> open_store(uint16_t port, bool serve) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = serve;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

// Both processes say that they are rank 0, at a store that the first of them serves as a launcher's agent would.
TEST(Rendezvous, ARestartDoesNotMeetTheRanksOfBefore) {
  on_processes(2, [] {
    Launch launch = launch_of(0, 1);
    launch.agent_store = true;
    const auto store = open_store(launch.port, /*serve=*/process_rank() == 0);
    if (process_rank() == 0) {
      Rendezvous first(launch, seconds(20));
      store->set("first", std::vector<uint8_t>{1});
      store->wait({"second"}, seconds(60));
      return;
    }
    store->wait({"first"}, seconds(60));
    launch.attempt = 1;
    EXPECT_NO_THROW(Rendezvous(launch, seconds(20)));
    store->set("second", std::vector<uint8_t>{1});
  });
}

TEST(Rendezvous, TwoProcessesOfOneRankAreAnError) {
  on_processes(2, [] {
    Launch launch = launch_of(0, 1);
    launch.agent_store = true;
    const auto store = open_store(launch.port, /*serve=*/process_rank() == 0);
    if (process_rank() == 0) {
      Rendezvous first(launch, seconds(20));
      store->set("first", std::vector<uint8_t>{1});
      store->wait({"second"}, seconds(60));
      return;
    }
    store->wait({"first"}, seconds(60));
    EXPECT_TRUE(contains(error_message([&] { Rendezvous(launch, seconds(5)); }), "one process of rank 0"));
    store->set("second", std::vector<uint8_t>{1});
  });
}

} // namespace
} // namespace fsdp::testing
