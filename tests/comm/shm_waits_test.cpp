#include <csignal>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/caller.h"
#include "comm/group_checks.h"
#include "comm/shm_backends.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

/// What the calling thread has used of a processor.
double seconds_of_work() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Ranks may outnumber the cores: who waits for long must leave them to those who work.
void expect_sleep(const GroupPointer& group, const std::function<void(Group&)>& meet) {
  const auto begun = std::chrono::steady_clock::now();
  group->barrier(kTest);
  if (group->rank() == 0) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  const double before = seconds_of_work();
  meet(*group);
  const auto waited = std::chrono::steady_clock::now() - begun;
  if (group->rank() != 0) {
    EXPECT_GE(waited, std::chrono::seconds(1)) << "it did not wait at all";
    EXPECT_LT(seconds_of_work() - before, 0.3);
  }
}

void expect_sleeps(const GroupPointer& group) {
  expect_sleep(group, [](Group& all) { all.barrier(kTest); });
  expect_sleep(group, [](Group& all) { start_reduce(all, {.numels = {1000}}).work->wait(); });
}

TEST(ShmWaits, ThreadsSleepUntilTheOthersCome) {
  run_threads(3, std::chrono::seconds(60), &expect_sleeps);
}

TEST(ShmWaits, ProcessesSleepUntilTheOthersCome) {
  on_processes(3, [] { expect_sleeps(join_processes(process_folder())); });
}

/// From a process of its own, which both are stopped by and go on by.
pid_t stop_for_a_while(const std::vector<std::string>& processes) {
  const pid_t child = fork();
  if (child == 0) {
    for (const auto& [number, seconds] : {std::pair{SIGSTOP, 8}, std::pair{SIGCONT, 0}}) {
      for (const auto& process : processes) {
        kill(std::stoi(process), number);
      }
      std::this_thread::sleep_for(std::chrono::seconds(seconds));
    }
    _exit(0);
  }
  return child;
}

// Rank 0 waits for rank 1, which is late by a moment of time in which they run.
TEST(ShmWaits, TimeInWhichAllAreStoppedDoesNotCount) {
  on_processes(2, [] {
    FileExchange exchange(process_folder(), process_rank(), 2);
    ShmOptions options;
    options.timeout = std::chrono::seconds(6);
    const auto processes = exchange(std::to_string(getpid()));
    const auto group = shm_group(process_rank(), 2, exchange, options);
    if (process_rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200)); // the other one waits
      const pid_t child = stop_for_a_while(processes);
      waitpid(child, nullptr, 0);
    }
    group->barrier(kTest);
  });
}

struct Interruption : std::exception {};

// Rank 0 waits until rank 1 has read its gradients.
TEST(ShmWaits, AnInterruptionAtTheEndOfAGroupIsNotLost) {
  on_processes(2, [] {
    static std::exception_ptr later;
    FileExchange exchange(process_folder(), process_rank(), 2);
    auto group = shm_group(process_rank(), 2, std::ref(exchange), {std::chrono::seconds(60), /*arena=*/true});
    if (group->rank() == 0) {
      start_reduce(*group, {.numels = {100'000}});
      set_caller(
          {.interruption = [] { return std::make_exception_ptr(Interruption()); },
           .raise_later = [](std::exception_ptr error) { later = std::move(error); }});
      group.reset();
      exchange("it is over");
      ASSERT_TRUE(later);
      EXPECT_THROW(std::rethrow_exception(later), Interruption);
      set_caller({});
    } else {
      exchange("");
      const auto said = error_message([&] { start_reduce(*group, {.numels = {100'000}}).work->wait(); });
      EXPECT_TRUE(contains(said, "rank 0 was interrupted while it waited for rank 1")) << said;
    }
  });
}

} // namespace
} // namespace fsdp::testing
