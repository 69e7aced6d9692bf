#include <chrono>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>

#include "comm/gloo_group.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Three ranks over Gloo, of which one stops in the middle: before it joins the second of two gathers.
struct Loss {
  int rank;
  int signal;
  milliseconds timeout;
};

std::string message_after(const Loss& loss) {
  const Launch launch = read_launch();
  Rendezvous rendezvous(launch, seconds(60));
  const auto group = gloo_group(rendezvous, launch, loss.timeout);
  const auto home = group->make_home({{300, 100, at::kFloat, at::kFloat}}, {}, {"make home", "blocks.1"});
  home->gather({"unshard", "blocks.1"})->wait();
  if (launch.rank == loss.rank) {
    raise(loss.signal);
  }
  const auto start = std::chrono::steady_clock::now();
  std::unique_ptr<Gathered> gathered;
  const std::string message = error_message([&] {
    gathered = home->gather({"unshard", "blocks.2"});
    gathered->wait();
  });
  if (gathered) {
    EXPECT_THROW(gathered->wait(), CommError) << "nothing has arrived that could be shown";
  }
  const auto soon =
      loss.signal == SIGKILL ? loss.timeout : loss.timeout + seconds(60); // a death is noticed long before
  EXPECT_LT(std::chrono::steady_clock::now() - start, soon);
  EXPECT_THROW(group->barrier({"barrier", ""}), CommError); // at once, and ever after
  const auto end = std::chrono::steady_clock::now();
  rendezvous.leave(seconds(2)); // from a store that may be gone, or not answer
  EXPECT_LT(std::chrono::steady_clock::now() - end, seconds(60));
  return message;
}

class C10dFailure : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gloo_available()) {
      GTEST_SKIP() << "built without Gloo";
    }
  }

  void lose(const Loss& loss) {
    const ProcessOptions options{.timeout = seconds(300), .lost = {loss.rank}, .environment = {}};
    on_processes(
        3,
        [&] {
          const std::string message = message_after(loss);
          EXPECT_TRUE(contains(message, "[unshard] rank " + std::to_string(process_rank()) + " of 3"));
          EXPECT_TRUE(contains(message, "'blocks.2'"));
          EXPECT_TRUE(contains(message, "over gloo"));
        },
        options);
  }
};

TEST_F(C10dFailure, AKilledRankEndsTheOthersAtOnce) {
  lose({.rank = 1, .signal = SIGKILL, .timeout = seconds(120)});
}

TEST_F(C10dFailure, SoDoesTheRankThatServesTheStore) {
  lose({.rank = 0, .signal = SIGKILL, .timeout = seconds(120)});
}

TEST_F(C10dFailure, AStoppedRankEndsTheOthersAfterTheTimeout) {
  lose({.rank = 1, .signal = SIGSTOP, .timeout = seconds(15)});
}

TEST_F(C10dFailure, AStoppedStoreHangsNobody) {
  lose({.rank = 0, .signal = SIGSTOP, .timeout = seconds(15)});
}

// As a write to the connection of a rank that has died.
TEST_F(C10dFailure, ABrokenPipeDoesNotEndTheProcess) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    const auto group = gloo_group(rendezvous, launch, seconds(20));
    std::raise(SIGPIPE);
    group->barrier({"barrier", ""});
    rendezvous.leave(seconds(20));
  });
}

TEST_F(C10dFailure, WhoIsMissingIsNamed) {
  on_processes(3, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    const auto group = gloo_group(rendezvous, launch, seconds(15));
    if (launch.rank == 2) {
      std::this_thread::sleep_for(seconds(30));
    } else {
      const std::string message = error_message([&] { group->barrier({"barrier", "epoch 3"}); });
      EXPECT_TRUE(contains(message, "rank 2 has not been seen at it")) << process_rank();
    }
    rendezvous.leave(seconds(60));
  });
}

/// Gloo groups cannot be made from here on.
void lose_network() {
  setenv("GLOO_SOCKET_IFNAME", "no-such-interface", /*overwrite=*/1);
}

TEST_F(C10dFailure, AGroupThatOneRankCannotMakeIsAnErrorOnAll) {
  on_processes(3, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    if (launch.rank == 1) {
      lose_network();
    }
    const std::string message = error_message<CommError>([&] { gloo_group(rendezvous, launch, seconds(600)); });
    const std::string mine = std::to_string(launch.rank);
    EXPECT_TRUE(contains(message, "[init] rank " + mine + " of 3 could not make the gloo group")) << mine;
    EXPECT_TRUE(launch.rank == 1 || contains(message, "rank 1 gave up")) << mine;
    rendezvous.leave(seconds(20));
  });
}

TEST_F(C10dFailure, ARankThatDiesWhileTheGroupIsMadeIsAnErrorOnAll) {
  const auto body = [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    if (launch.rank == 1) {
      std::raise(SIGKILL);
    }
    const std::string message = error_message<CommError>([&] { gloo_group(rendezvous, launch, seconds(15)); });
    EXPECT_TRUE(contains(message, "could not make the gloo group"));
    rendezvous.leave(seconds(2));
  };
  on_processes(3, body, {.timeout = seconds(300), .lost = {1}});
}

// Ranks of the other part too, which have theirs.
TEST_F(C10dFailure, APartThatOneRankCannotMakeIsAnErrorOnAll) {
  on_processes(4, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    const auto group = gloo_group(rendezvous, launch, seconds(600));
    if (launch.rank == 1) {
      lose_network();
    }
    const bool is_hit = launch.rank % 2 == 1;
    const std::string message = error_message<CommError>([&] {
      group->split(launch.rank % 2, {"make mesh", "dim 1"});
      group->barrier({"barrier", ""});
    });
    EXPECT_TRUE(contains(message, is_hit ? "[make mesh]" : "[barrier]"));
    EXPECT_TRUE(!is_hit || contains(message, "could not make the gloo group for 'dim 1'"));
    EXPECT_TRUE(launch.rank == 1 || contains(message, "gave up")) << launch.rank;
    EXPECT_THROW(group->barrier({"barrier", ""}), CommError);
    rendezvous.leave(seconds(20));
  });
}

TEST_F(C10dFailure, AStoreThatStopsInASplitHangsNobody) {
  const auto body = [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    const auto group = gloo_group(rendezvous, launch, seconds(15));
    group->barrier({"barrier", ""});
    if (launch.rank == 0) {
      raise(SIGSTOP);
    }
    error_message<CommError>([&] { group->split(0, {"make mesh", ""}); });
    rendezvous.leave(seconds(2));
  };
  on_processes(3, body, {.timeout = seconds(300), .lost = {0}});
}

// Having nothing to do any more.
TEST_F(C10dFailure, TheRankThatServesTheStoreMayEndBeforeTheOthers) {
  on_processes(3, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, seconds(60));
    const auto group = gloo_group(rendezvous, launch, seconds(60));
    const auto part = group->split(launch.rank == 0 ? 0 : 1, {"make mesh", ""});
    group->barrier({"barrier", ""});
    if (launch.rank == 0) {
      return;
    }
    if (launch.rank == 2) {
      std::this_thread::sleep_for(seconds(3)); // the other listens by then whether anybody gives up
    }
    EXPECT_NO_THROW(part->barrier({"barrier", ""}));
  });
}

} // namespace
} // namespace fsdp::testing
