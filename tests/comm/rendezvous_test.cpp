#include "comm/rendezvous.h"

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/port_file.h"
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
    rendezvous.leave(seconds(60));
  });
}

TEST(Rendezvous, NamesWhoIsMissing) {
  on_processes(4, [] {
    const int rank = process_rank();
    if (rank == 1 || rank == 3) {
      return;
    }
    FileExchange meet(process_folder(), rank / 2, 2);
    meet(""); // start together
    const std::string message = error_message([&] { Rendezvous(launch_of(rank, 4), seconds(10)); });
    EXPECT_TRUE(contains(message, "expected 4 ranks")) << rank;
    EXPECT_TRUE(contains(message, "ranks 1, 3 have not arrived after 10 s")) << rank;
    meet(""); // a rank that is slow still hears it of the other
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
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(50));
    EXPECT_TRUE(contains(message, "rank 1 has died"));
    FileExchange(process_folder(), process_rank() / 2, 2)(""); // a rank that is slow still hears it of the other
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

/// A port that accepts connections, and where nobody says anything.
class MutePort {
 public:
  MutePort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    bind(socket_, reinterpret_cast<sockaddr*>(&address), length);
    listen(socket_, 10);
    getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    port = ntohs(address.sin_port);
  }
  ~MutePort() {
    close(socket_);
  }

  uint16_t port = 0;

 private:
  int socket_;
};

TEST(Rendezvous, AMutePortIsAnError) {
  on_processes(1, [] {
    const MutePort mute;
    Launch launch = launch_of(1, 2);
    launch.port = mute.port;
    const std::string message = error_message<CommError>([&] { Rendezvous(launch, milliseconds(1500)); });
    EXPECT_TRUE(contains(message, "[init] rank 1 expected to reach the rendezvous at 127.0.0.1:"));
    EXPECT_TRUE(contains(message, "the store of the rendezvous does not answer"));
    EXPECT_TRUE(contains(message, "see whether rank 0 runs"));
  });
}

void await_stop(const std::string& process) {
  std::string state;
  while (state.find(") T ") == std::string::npos) {
    std::this_thread::sleep_for(milliseconds(10));
    std::getline(std::ifstream("/proc/" + process + "/stat"), state);
  }
}

TEST(Rendezvous, ARankThatStopsWhileItServesIsAnError) {
  const auto body = [] {
    if (process_rank() == 0) {
      const auto store = open_store(launch_of(0, 2).port, /*serve=*/true);
      FileExchange(process_folder(), 0, 2)(std::to_string(getpid()));
      std::raise(SIGSTOP);
      return;
    }
    await_stop(FileExchange(process_folder(), 1, 2)("")[0]);
    const std::string message = error_message<CommError>([&] { Rendezvous(launch_of(1, 2), milliseconds(2000)); });
    EXPECT_TRUE(contains(message, "does not answer")) << message;
  };
  on_processes(2, body, {.timeout = seconds(60), .lost = {0}});
}

/// Of those who listen at the port, the addresses in hexadecimal digits.
std::vector<std::string> listeners(uint16_t port) {
  std::vector<std::string> addresses;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      const size_t colon = local.find(':');
      if (state == "0A" && std::stoi(local.substr(colon + 1), nullptr, 16) == port) {
        addresses.push_back(local.substr(0, colon));
      }
    }
  }
  return addresses;
}

TEST(Rendezvous, OfTheLoopbackListensThereOnly) {
  const std::map<std::string, std::string> loopbacks{
      {"127.0.0.1", "0100007F"},
      {"localhost", "0100007F"},
      {"127.0.0.5", "0500007F"},
      {"::1", "00000000000000000000000001000000"}};
  for (const auto& [address, digits] : loopbacks) {
    on_processes(2, [&] {
      Launch launch = launch_of(process_rank(), 2);
      launch.address = address;
      Rendezvous rendezvous(launch, seconds(30));
      EXPECT_EQ(listeners(launch.port), std::vector{digits}) << address;
      EXPECT_EQ(rendezvous.exchange("x").size(), 2);
      rendezvous.leave(seconds(60));
    });
  }
}

TEST(Rendezvous, OfAHostsNameListensEverywhere) {
  on_processes(2, [&] {
    Launch launch = launch_of(process_rank(), 2);
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    launch.address = name.data();
    Rendezvous rendezvous(launch, seconds(30));
    EXPECT_EQ(rendezvous.exchange("x").size(), 2);
    rendezvous.leave(seconds(60));
  });
}

TEST(Rendezvous, AnotherJobsIsAnError) {
  on_processes(3, [] {
    Launch launch = launch_of(process_rank(), 2);
    launch.job = "a";
    if (process_rank() == 2) { // which came to the wrong port
      launch.rank = 1;
      launch.job = "b";
      const std::string message = error_message([&] { Rendezvous(launch, seconds(60)); });
      EXPECT_TRUE(contains(message, "rank 1 of job 'b'"));
      EXPECT_TRUE(contains(message, "rank 0 of job 'a' serves there"));
      FileExchange(process_folder(), 2, 3)("");
      return;
    }
    Rendezvous rendezvous(launch, seconds(60));
    EXPECT_EQ(rendezvous.exchange("x").size(), 2);
    FileExchange(process_folder(), process_rank(), 3)("");
    rendezvous.leave(seconds(60));
  });
}

TEST(Rendezvous, RanksOfOneHostFindThePortThatRankZeroWasGiven) {
  on_processes(3, [] {
    Launch launch = launch_of(process_rank(), 3);
    launch.port = 0;
    launch.job = process_folder().string();
    Rendezvous rendezvous(launch, seconds(60));
    EXPECT_EQ(rendezvous.exchange("x").size(), 3);
    EXPECT_EQ(rendezvous.exchange("y").size(), 3);
    if (process_rank() == 0) {
      EXPECT_FALSE(published_port(launch.job)) << "of no use any more";
    }
    rendezvous.leave(seconds(60));
  });
}

// Both processes say that they are rank 0, at a store that the first of them serves as a launcher's agent would.
// Nor does another job that has the same store.
class RendezvousOfAnotherStart : public ::testing::TestWithParam<std::function<void(Launch&)>> {};
INSTANTIATE_TEST_SUITE_P(
    Rendezvous,
    RendezvousOfAnotherStart,
    ::testing::Values([](Launch& launch) { launch.attempt = 1; }, [](Launch& launch) { launch.job = "another"; }));

TEST_P(RendezvousOfAnotherStart, DoesNotMeetTheRanksOfBefore) {
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
    GetParam()(launch);
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
    EXPECT_TRUE(contains(error_message([&] { Rendezvous(launch, seconds(60)); }), "one process of rank 0"));
    store->set("second", std::vector<uint8_t>{1});
  });
}

// A rank that has given its word may still read the others'.
TEST(Rendezvous, WhoServesItStaysUntilAllRanksKnow) {
  on_processes(3, [] {
    Rendezvous rendezvous(launch_of(process_rank(), 3), seconds(30));
    rendezvous.exchange("x");
    if (process_rank() == 2) {
      std::this_thread::sleep_for(milliseconds(700));
      std::ofstream(process_folder() / "known") << "all";
    }
    rendezvous.conclude();
    EXPECT_TRUE(process_rank() != 0 || std::filesystem::exists(process_folder() / "known"));
    FileExchange(process_folder(), process_rank(), 3)(""); // so that nobody is found dead
    rendezvous.leave(seconds(60));
  });
}

// Only the first rank waits there, so it looks at all others, and not at one that is busy.
TEST(Rendezvous, WhoDiesAtTheEndIsFoundBehindABusyRank) {
  constexpr int kDies = 1, kIsBusy = 2;
  const auto body = [] {
    const int rank = process_rank();
    const auto found = process_folder() / "found";
    if (rank == kIsBusy) { // is the last to come, which rank 0, that is the first, would watch
      std::this_thread::sleep_for(milliseconds(300));
    }
    Rendezvous rendezvous(launch_of(rank, 3), seconds(600));
    rendezvous.exchange("x");
    if (rank == kDies) {
      raise(SIGKILL);
    }
    if (rank == kIsBusy) {
      while (!std::filesystem::exists(found)) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      return;
    }
    const auto message = error_message<CommError>([&] { rendezvous.conclude(); });
    EXPECT_TRUE(contains(message, "rank 1 has died")) << message;
    std::ofstream(found) << "it";
  };
  on_processes(3, body, {.lost = {kDies}});
}

// Each watches another rank in each look.
TEST(Rendezvous, WhoDiesIsFoundBehindABusyRank) {
  constexpr int kDies = 1, kIsBusy = 2;
  const auto body = [] {
    const int rank = process_rank();
    const auto found = process_folder() / "found";
    std::this_thread::sleep_for(milliseconds(300 * rank)); // the first watches the last first, which is busy
    Rendezvous rendezvous(launch_of(rank, 3), seconds(600));
    if (rank == kDies) {
      raise(SIGKILL);
    }
    if (rank == kIsBusy) {
      while (!std::filesystem::exists(found)) {
        std::this_thread::sleep_for(milliseconds(10));
      }
    } else {
      const auto message = error_message<CommError>([&] { rendezvous.exchange("x"); });
      EXPECT_TRUE(contains(message, "rank 1 has died")) << message;
      std::ofstream(found) << "it";
    }
  };
  on_processes(3, body, {.lost = {kDies}});
}

// It has come to all meetings, and nobody waits for it any more.
TEST(Rendezvous, ARankThatEndsEarlyIsNotFoundDead) {
  on_processes(3, [] {
    const int rank = process_rank();
    if (rank == 1) { // is the last, which rank 0 watches, that is the first
      std::this_thread::sleep_for(milliseconds(300));
    }
    Rendezvous rendezvous(launch_of(rank, 3), seconds(30));
    rendezvous.exchange("x");
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(2500)); // rank 0 has looked meanwhile
    }
    rendezvous.conclude();
    if (rank != 1) {
      rendezvous.leave(milliseconds(100));
    }
  });
}

// On the same host, where rank 0 takes a port and publishes it until all have come.
TEST(Rendezvous, RanksThatRefusedAfterOneAnotherMeetNext) {
  on_processes(2, [] {
    Launch launch = launch_of(process_rank(), 2);
    launch.port = 0;
    launch.job = process_folder().string();
    if (process_rank() == 0) {
      refuse_to_meet(launch, seconds(60), "no device");
    }
    FileExchange(process_folder(), process_rank(), 2)("");
    if (process_rank() == 1) {
      refuse_to_meet(launch, seconds(60), "no device");
    }
    Rendezvous rendezvous(launch, seconds(60));
    EXPECT_EQ(rendezvous.exchange("x").size(), 2);
    rendezvous.leave(seconds(60));
  });
}

TEST(Rendezvous, RanksThatTryAgainAfterOneDidNotReachTheOthersMeet) {
  on_processes(2, [] {
    const int rank = process_rank();
    FileExchange exchange(process_folder(), rank, 2);
    if (rank == 1) {
      error_message<CommError>([&] { Rendezvous(launch_of(1, 2), milliseconds(200)); }); // nobody serves it yet
    }
    exchange("");
    if (rank == 0) {
      error_message<CommError>([&] { Rendezvous(launch_of(0, 2), milliseconds(200)); });
    }
    exchange("");
    Rendezvous rendezvous(launch_of(rank, 2), seconds(60));
    EXPECT_EQ(rendezvous.exchange("x").size(), 2);
    rendezvous.leave(seconds(60));
  });
}

TEST(Rendezvous, TheOthersHearWhyOneGivesUp) {
  on_processes(3, [] {
    const int rank = process_rank();
    Rendezvous rendezvous(launch_of(rank, 3), seconds(60));
    if (rank == 1) {
      rendezvous.give_up("rank 1 gave up: no device");
      rendezvous.give_up("for another reason");
      return;
    }
    EXPECT_TRUE(contains(error_message([&] { rendezvous.exchange("x"); }), "rank 1 gave up: no device"));
    FileExchange(process_folder(), rank / 2, 2)(""); // a rank that is slow still hears it of the other
  });
}

TEST(Rendezvous, TheOthersHearWhyOneDoesNotCome) {
  for (const int refusing : {0, 2}) {
    on_processes(3, [refusing] {
      const Launch launch = launch_of(process_rank(), 3); // a port that rank 0 took would soon be found no more
      if (process_rank() == refusing) {
        refuse_to_meet(launch, seconds(60), "no device");
      } else {
        const std::string message = error_message<CommError>([&] { Rendezvous(launch, seconds(60)); });
        EXPECT_TRUE(contains(message, "expected 3 ranks")) << message;
        EXPECT_TRUE(contains(message, "no device")) << message;
      }
      FileExchange(process_folder(), process_rank(), 3)(""); // so that nobody is found dead
    });
  }
}

// As on a full disk.
TEST(Rendezvous, APortThatCannotBeWrittenIsAnErrorAtOnce) {
  on_processes(1, [] {
    signal(SIGXFSZ, SIG_IGN);
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
    const std::string job = process_folder().string();
    const auto message = error_message([&] { publish_port(job, /*port=*/1); });
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0); // what fails can be said
    EXPECT_TRUE(contains(message, "could not write")) << message;
    EXPECT_TRUE(contains(message, "MASTER_PORT")) << message;
    EXPECT_FALSE(std::filesystem::exists(port_file(job)));
  });
}

// Whose rank 0 was killed.
TEST(Rendezvous, APortOfAnEarlierStartIsNotWaitedFor) {
  on_processes(2, [] {
    Launch launch = launch_of(process_rank(), 2);
    launch.port = 0;
    launch.job = process_folder().string();
    if (process_rank() == 1) {
      publish_port(launch.job, /*port=*/1);
    }
    FileExchange(process_folder(), process_rank(), 2)("");
    if (process_rank() == 0) {
      std::this_thread::sleep_for(milliseconds(500));
    }
    Rendezvous rendezvous(launch, seconds(60));
    EXPECT_EQ(rendezvous.exchange("x").size(), 2);
    rendezvous.leave(seconds(60));
  });
}

} // namespace
} // namespace fsdp::testing
