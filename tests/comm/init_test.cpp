#include <fsdp/init.h>

#include <chrono>
#include <csignal>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/phrase.h"
#include "comm/c10d/factory.h"
#include "support/error_message.h"
#include "support/file_exchange.h"
#include "support/memory.h"
#include "support/ranks.h"
#include "support/scoped_environment.h"

namespace fsdp::testing {
namespace {

using std::chrono::seconds;

float sum_over_ranks(float mine) {
  at::Tensor tensor = at::full({1}, mine);
  world()->all_reduce(tensor, ReduceOp::kSum, 1, {"test", ""})->wait();
  return tensor.item<float>();
}

void expect_world_of(int size, const std::string& backend) {
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(world_size(), size);
  EXPECT_EQ(world()->size(), size);
  EXPECT_EQ(world()->name(), backend);
  EXPECT_EQ(device(), c10::Device(c10::kCPU));
  EXPECT_EQ(sum_over_ranks(static_cast<float>(rank() + 1)), static_cast<float>(size * (size + 1) / 2));
  barrier();
}

// Each test runs in processes of its own: init is once per process.
TEST(Init, AloneIsAWorldOfOne) {
  on_processes(1, [] {
    const ScopedEnvironment environment({});
    init();
    EXPECT_EQ(rank(), 0);
    EXPECT_EQ(local_rank(), 0);
    expect_world_of(1, group_of_one()->name());
  });
}

TEST(Init, RanksOfOneHostShareMemory) {
  for (const int size : {2, 3}) {
    on_processes(size, [&] {
      init();
      EXPECT_EQ(rank(), process_rank());
      EXPECT_EQ(local_rank(), process_rank());
      expect_world_of(size, "shm");
      shutdown();
    });
  }
}

bool lies_in_arena(const at::Tensor& tensor) {
  return mapping_of(tensor.const_data_ptr()).name.find("fsdp-arena") != std::string::npos;
}

/// After the first that others had to read, such tensors lie in an arena, or not.
void expect_arena(bool expected, const InitOptions& options) {
  init(options);
  expect_world_of(2, "shm");
  const at::Tensor first = at::ones({1 << 20});
  EXPECT_FALSE(lies_in_arena(first));
  world()->all_reduce(first, ReduceOp::kSum, 1, {"test", ""})->wait();
  EXPECT_EQ(first[0].item<float>(), 2);
  EXPECT_EQ(lies_in_arena(at::zeros({1 << 20})), expected);
  shutdown();
}

TEST(Init, TheArenaCanBeTurnedOff) {
  on_processes(2, [] { expect_arena(true, {}); });
  on_processes(2, [] { expect_arena(false, {.shared_arena = false}); });
  on_processes(2, [] { expect_arena(false, {}); }, {.environment = {{"FSDP_ARENA", "0"}}});
  on_processes(2, [] { expect_arena(false, {.shared_arena = true}); }, {.environment = {{"FSDP_ARENA", "0"}}});
}

TEST(Init, GlooByName) {
  for (const int size : {2, 3, 4}) {
    on_processes(size, [&] {
      if (!gloo_available()) {
        EXPECT_TRUE(contains(error_message([] { init({.backend = "gloo"}); }), "install libgloo-dev for Gloo"));
        return;
      }
      init({.backend = "gloo"});
      expect_world_of(size, "gloo");
      const auto part = world()->split(rank() % 2, {"test", ""});
      EXPECT_EQ(part->size(), (size + 1 - rank() % 2) / 2);
      barrier();
    });
  }
}

TEST(Init, NcclNeedsCuda) {
  on_processes(1, [] {
    const ScopedEnvironment environment({});
    const std::string message = error_message([] { init({.backend = "nccl", .device = "cpu"}); });
    EXPECT_TRUE(contains(message, "got 'nccl'"));
    EXPECT_TRUE(contains(message, "'shm' and 'gloo' are for the CPU"));
    EXPECT_FALSE(is_initialized());
  });
}

TEST(Init, UnknownNamesAreErrorsThatListTheChoices) {
  on_processes(1, [] {
    const ScopedEnvironment environment({});
    EXPECT_TRUE(contains(error_message([] { init({.backend = "carrier pigeon"}); }), "'shm', 'gloo', 'nccl'"));
    EXPECT_TRUE(contains(error_message([] { init({.device = "abacus"}); }), "(cpu"));
    EXPECT_TRUE(contains(error_message([] { init({.device = "meta"}); }), "(cpu"));
    EXPECT_FALSE(is_initialized());
  });
}

// In processes of their own, where alone that device is known.
TEST(Init, DevicesThatNoBackendIsKnownForAreErrors) {
  on_processes(2, [] {
    const c10::impl::DeviceGuardImplRegistrar known(c10::kHPU, new c10::impl::NoOpDeviceGuardImpl<c10::kHPU>());
    const std::string message = error_message([] { init({.device = "hpu:0"}); });
    EXPECT_TRUE(contains(message, "expected a device that libfsdp knows a backend for (cpu, cuda), got hpu:0"));
    EXPECT_TRUE(contains(message, "Mesh::from_group(process_group)"));
    EXPECT_FALSE(is_initialized());
    FileExchange(process_folder(), process_rank(), 2)(""); // so that nobody is found dead
  });
}

TEST(Init, EachRankNeedsADevice) {
  on_processes(2, [] {
    const c10::impl::DeviceGuardImplRegistrar known(c10::kHPU, new c10::impl::NoOpDeviceGuardImpl<c10::kHPU>());
    const std::string message = error_message([] { init({.device = "hpu"}); });
    EXPECT_TRUE(contains(message, "expected a hpu device for local rank 1, but this host has 1")) << message;
    EXPECT_EQ(contains(message, "rank 1 gave up"), process_rank() == 0) << message;
  });
}

TEST(Init, BeforeItEverythingSaysCallInit) {
  on_processes(1, [] {
    for (const std::string& message :
         {error_message([] { rank(); }),
          error_message([] { world_size(); }),
          error_message([] { local_rank(); }),
          error_message([] { device(); }),
          error_message([] { world(); }),
          error_message([] { barrier(); })}) {
      EXPECT_TRUE(contains(message, "call fsdp::init() first"));
    }
    EXPECT_FALSE(is_initialized());
    shutdown(); // nothing to leave
  });
}

/// A forked child that does nothing but end.
void expect_child_ends() {
  const pid_t child = fork();
  if (child == 0) {
    std::exit(0); // and destroys what is static
  }
  const auto give_up = std::chrono::steady_clock::now() + seconds(30);
  int status = -1;
  while (waitpid(child, &status, WNOHANG) == 0 && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (status == -1) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// Also if programs keep groups in variables that are destroyed at exit.
TEST(Init, AForkedChildOfARankEnds) {
  for (const std::string backend : {"shm", "gloo"}) {
    on_processes(2, [&] {
      if (backend == "gloo" && !gloo_available()) {
        return;
      }
      init({.backend = backend});
      static std::shared_ptr<Group> kept, part;
      static std::shared_ptr<Home> home;
      kept = world();
      part = kept->split(0, {"test", ""});
      home = part->make_home({{4, 2, at::kFloat, at::kFloat}}, {}, {"test", ""});
      expect_child_ends();
      expect_world_of(2, backend);
      home.reset();
      part.reset();
      kept.reset();
      shutdown();
      init({.backend = backend});
      expect_child_ends();
      expect_world_of(2, backend);
    });
  }
}

// Over Gloo, whose connections it has, too.
TEST(Init, AForkedChildHasNoPartInCollectives) {
  for (const std::string backend : {"shm", "gloo"}) {
    on_processes(2, [&] {
      if (backend == "gloo" && !gloo_available()) {
        return;
      }
      init({.backend = backend});
      const auto home = world()->make_home({{4, 2, at::kFloat, at::kFloat}}, {}, {"test", ""});
      const auto gathered = home->gather({"test", ""});
      const auto reduced = world()->all_reduce(at::ones({1000}), ReduceOp::kSum, 1, {"test", ""});
      const pid_t child = fork();
      if (child == 0) {
        alarm(60); // a child that hangs is a failure
        const std::function<void()> calls[] = {
            [] {
              world()->barrier({"test", ""});
            },
            [] {
              world()->exchange("", {"test", ""});
            },
            [] {
              world()->split(0, {"test", ""});
            },
            [&] {
              home->gather({"test", ""})->wait();
            },
            [&] { gathered->wait(); },
            [&] { reduced->wait(); }};
        for (const auto& call : calls) {
          EXPECT_TRUE(contains(error_message(call), "a forked child"));
        }
        EXPECT_TRUE(reduced->done()) << "a wait would throw, not block";
        world()->abort("no business of the parent");
        _exit(::testing::Test::HasFailure() ? 1 : 0);
      }
      int status = -1;
      waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
      gathered->wait();
      reduced->wait();
      expect_world_of(2, backend);
      shutdown();
    });
  }
}

TEST(Init, AnEndlessTimeoutIsALongOne) {
  for (const std::string backend : {"shm", "gloo"}) {
    on_processes(2, [&] {
      if (backend == "gloo" && !gloo_available()) {
        return;
      }
      init({.backend = backend, .timeout = std::chrono::milliseconds::max()});
      EXPECT_EQ(world()->split(0, {"test", ""})->size(), 2);
      expect_world_of(2, backend);
    });
  }
}

TEST(Init, GlooTakesSeveralInterfaces) {
  const auto body = [] {
    if (gloo_available()) {
      init({.backend = "gloo"});
      expect_world_of(2, "gloo");
    }
  };
  on_processes(2, body, {.environment = {{"GLOO_SOCKET_IFNAME", "lo,lo"}}});
}

TEST(Init, ASecondCallDoesNothing) {
  on_processes(2, [] {
    init();
    const Group* first = world().get();
    init();
    init({.backend = "gloo"}); // warns
    EXPECT_EQ(world().get(), first);
    barrier();
  });
}

TEST(Init, JoinsAgainAfterShutdown) {
  on_processes(2, [] {
    for (int round = 0; round < 3; ++round) {
      init();
      expect_world_of(2, "shm");
      shutdown();
      EXPECT_FALSE(is_initialized());
    }
  });
}

// The rank that serves the rendezvous ends last, also when the program just ends.
TEST(Init, LeavesInOrderAtExit) {
  on_processes(2, [] {
    init();
    const auto start = std::chrono::steady_clock::now();
    barrier();
    if (process_rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100)); // of the two seconds for which it is waited
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
      options.waitWorkers = false;
      options.timeout = seconds(2);
      try {
        c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      } catch (const std::exception& error) {
        EXPECT_GT(std::chrono::steady_clock::now() - start, seconds(2)) << error.what();
      }
    }
  });
}

TEST(Init, ARankThatCannotHaveItsDeviceTellsTheOthers) {
  for (const int without : {0, 1}) {
    on_processes(2, [without] {
      const bool asks = process_rank() == without;
      const std::string message = error_message([&] { init({.device = asks ? "abacus" : "cpu"}); });
      EXPECT_TRUE(contains(message, "expected a device that this LibTorch and this host have")) << message;
      EXPECT_EQ(contains(message, phrase("rank {} gave up", without)), !asks) << message;
      FileExchange(process_folder(), process_rank(), 2)(""); // so that nobody is found dead
      init(); // which all tried once
      expect_world_of(2, "shm");
    });
  }
}

TEST(Init, ARankWithAMalformedVariableTellsTheOthers) {
  for (const char* name : {"FSDP_TIMEOUT", "FSDP_ARENA", "FSDP_CHECK_ORDER"}) {
    on_processes(2, [name] {
      if (process_rank() == 1) {
        setenv(name, "what", /*overwrite=*/1);
      }
      const std::string message = error_message([] { init({.backend = "gloo", .device = "cpu"}); });
      EXPECT_TRUE(contains(message, name)) << message;
      EXPECT_EQ(contains(message, "rank 1 gave up"), process_rank() == 0) << message;
      FileExchange(process_folder(), process_rank(), 2)(""); // so that nobody is found dead
    });
  }
}

TEST(Init, DifferentOptionsOnTheRanksAreAnError) {
  on_processes(2, [] {
    const std::string backend = process_rank() == 0 ? "gloo" : "shm";
    EXPECT_TRUE(contains(error_message([&] { init({.backend = backend}); }), "same InitOptions"));
    FileExchange(process_folder(), process_rank(), 2)(""); // so that nobody is found dead
  });
}

TEST(Init, RanksOfWhichSomeCheckTheOrderAreTold) {
  for (const char* setting : {"0", "1"}) {
    on_processes(2, [setting] {
      if (process_rank() == 1) {
        setenv("FSDP_CHECK_ORDER", setting, /*overwrite=*/1);
      }
      const auto message = error_message([] { init({.backend = "gloo", .device = "cpu"}); });
      EXPECT_TRUE(contains(message, "FSDP_CHECK_ORDER=(unset)")) << message;
      EXPECT_TRUE(contains(message, phrase("FSDP_CHECK_ORDER={}", setting))) << message;
      FileExchange(process_folder(), process_rank(), 2)(""); // so that nobody is found dead
    });
  }
}

TEST(Init, AgainWithAnotherTimeoutIsAWarning) {
  const ScopedEnvironment alone({});
  init();
  for (const int minutes : {10, 60}) {
    ::testing::internal::CaptureStderr();
    init({.timeout = std::chrono::minutes(minutes)});
    EXPECT_EQ(contains(::testing::internal::GetCapturedStderr(), "a timeout of 600 s"), minutes == 60);
  }
  shutdown();
}

TEST(Init, AMissingRankIsNamed) {
  on_processes(3, [] {
    if (process_rank() == 2) {
      return;
    }
    FileExchange(process_folder(), process_rank(), 2)(""); // start together
    const std::string message = error_message([] { init({.timeout = std::chrono::seconds(10)}); });
    if (process_rank() == 0) {
      EXPECT_TRUE(contains(message, "rank 2 has not arrived after 10 s"));
    }
  });
}

TEST(Init, TheTimeoutComesFromTheEnvironment) {
  on_processes(2, [] {
    if (process_rank() == 1) {
      return;
    }
    setenv("FSDP_TIMEOUT", "6.5", /*overwrite=*/1);
    EXPECT_TRUE(contains(error_message([] { init(); }), "after 6.5 s"));
  });
}

TEST(Init, WorksUnderMpirunsVariables) {
  on_processes(2, [] {
    const int mine = process_rank();
    const ScopedEnvironment environment(
        {{"OMPI_COMM_WORLD_RANK", std::to_string(mine)},
         {"OMPI_COMM_WORLD_SIZE", "2"},
         {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(mine)},
         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
         {"PMIX_NAMESPACE", process_folder().string()}});
    init();
    expect_world_of(2, "shm");
    EXPECT_EQ(rank(), mine);
    EXPECT_EQ(local_rank(), mine);
    shutdown();
  });
}

TEST(Init, FindsTheLocalRankWhereTheLauncherDoesNotTell) {
  on_processes(3, [] {
    unsetenv("LOCAL_RANK");
    init();
    EXPECT_EQ(local_rank(), process_rank());
    barrier();
  });
}

// The launcher's agent serves the store: here rank 0's process does, apart from what init makes.
TEST(Init, UsesTheAgentsStore) {
  on_processes(2, [] {
    c10::intrusive_ptr<c10d::TCPStore> agent;
    if (process_rank() == 0) {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
      options.isServer = true;
      options.waitWorkers = false;
      agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    }
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", /*overwrite=*/1);
    setenv("TORCHELASTIC_RESTART_COUNT", "1", /*overwrite=*/1);
    init();
    expect_world_of(2, "shm");
    shutdown();
    if (agent) {
      agent->wait({"done"}, seconds(20));
    } else {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
      options.waitWorkers = false;
      c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)->set("done", std::vector<uint8_t>{1});
    }
  });
}

TEST(Init, ThreadRanksHaveTheirOwnWorld) {
  on_threads(3, [] {
    EXPECT_TRUE(is_initialized());
    init(); // nothing
    EXPECT_EQ(world_size(), 3);
    EXPECT_EQ(sum_over_ranks(static_cast<float>(rank())), 3);
  });
  EXPECT_FALSE(is_initialized());
}

/// What shared memory is tried with does not fit on rank 1.
void without_room(const std::function<void()>& body) {
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{.rlim_cur = process_rank() == 1 ? 4095 : before.rlim_cur, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  body();
  setrlimit(RLIMIT_FSIZE, &before);
}

TEST(Init, RanksThatCannotShareMemoryTalkOverGloo) {
  on_processes(3, [] {
    without_room([] {
      if (gloo_available()) {
        ::testing::internal::CaptureStderr();
        init({.device = "cpu"});
        EXPECT_TRUE(
            contains(::testing::internal::GetCapturedStderr(), "on one host but cannot read each other's memory"));
        expect_world_of(3, "gloo");
        shutdown();
      }
    });
  });
  on_processes(3, [] {
    without_room([] {
      const auto said = error_message([] { init({.backend = "shm", .device = "cpu"}); });
      EXPECT_TRUE(contains(said, "on one host's CPU"));
      EXPECT_TRUE(contains(said, "'gloo'"));
    });
    FileExchange(process_folder(), process_rank(), 3)(""); // so that nobody is found dead
  });
}

TEST(Init, WhatOneRankCannotReadAllRanksAreToldOf) {
  on_processes(3, [] {
    if (process_rank() == 1) {
      setenv("FSDP_ARENA_MB", "abc", /*overwrite=*/1);
    }
    const auto said = error_message([] { init({.backend = "shm", .device = "cpu"}); });
    EXPECT_TRUE(contains(said, "FSDP_ARENA_MB"));
    FileExchange(process_folder(), process_rank(), 3)(""); // so that nobody is found dead
  });
}

// Static variables of a program's end after those of ours that were first used later.
TEST(Init, GroupsInStaticVariablesMayStillWaitAtTheEnd) {
  on_processes(2, [] {
    static std::shared_ptr<Group> part;
    static std::unique_ptr<Work> work;
    init({.backend = "shm", .device = "cpu"});
    part = world()->split(0, {"make mesh", ""});
    static at::Tensor sum = at::ones({100'000});
    work = part->all_reduce(sum, ReduceOp::kSum, /*divide_by=*/1, {"all-reduce", ""});
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  });
}

} // namespace
} // namespace fsdp::testing
