#pragma once

#include <chrono>
#include <filesystem>
#include <initializer_list>
#include <vector>

#include <fsdp/group.h>
#include "comm/group_checks.h"
#include "comm/world.h"
#include "support/file_exchange.h"
#include "support/ranks.h"

namespace fsdp::testing {

/// In a process that a test started: the shared-memory group of all its ranks.
inline GroupPointer join_processes(
    const std::filesystem::path& folder,
    std::chrono::milliseconds timeout = std::chrono::seconds(60),
    bool arena = true) {
  const int size = std::atoi(std::getenv("WORLD_SIZE"));
  return shm_group(process_rank(), size, FileExchange(folder, process_rank(), size), {timeout, arena});
}

inline void run_threads(int ranks, std::chrono::milliseconds timeout, const RankBody& body) {
  thread_group(
      ranks, [&] { body(current_world()->group); }, timeout);
}

/// For tests that every rank's process runs: see `run_tests_on_processes`.
inline void run_in_suite(int, std::chrono::milliseconds timeout, const RankBody& body) {
  const bool arena = std::getenv("FSDP_TEST_NO_ARENA") == nullptr;
  body(join_processes(folder_of_test(), timeout, arena));
}

inline std::vector<Backend> shm_backends() {
  if (in_suite()) {
    return {{"Processes", std::atoi(std::getenv("WORLD_SIZE")), &run_in_suite}};
  }
  return {{"Threads", 2, &run_threads}, {"Threads", 3, &run_threads}, {"Threads", 4, &run_threads}};
}

} // namespace fsdp::testing
