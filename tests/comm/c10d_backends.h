#pragma once

#include <chrono>
#include <initializer_list>
#include <memory>
#include <vector>

#include "comm/conformance.h"
#include "comm/gloo_group.h"
#include "support/ranks.h"

namespace fsdp::testing {

/// In a process that `on_processes` started: the Gloo group of all its ranks. Ranks keep their rendezvous until all
/// have left it, or the store would go with the first of them.
inline void run_gloo(std::chrono::milliseconds timeout, const RankBody& body) {
  const Launch launch = read_launch();
  Launch meet = launch;
  meet.address = "127.0.0.1";
  meet.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  Rendezvous rendezvous(meet, std::chrono::seconds(60));
  body(gloo_group(rendezvous, launch, timeout));
  rendezvous.leave(std::chrono::seconds(20));
}

inline void run_gloo_processes(int ranks, std::chrono::milliseconds timeout, const RankBody& body) {
  on_processes(ranks, [&] { run_gloo(timeout, body); }, {.environment = {{"FSDP_CHECK_ORDER", "0"}}});
}

inline void run_checked_gloo_processes(int ranks, std::chrono::milliseconds timeout, const RankBody& body) {
  on_processes(ranks, [&] { run_gloo(timeout, body); }, {.environment = {{"FSDP_CHECK_ORDER", "1"}}});
}

inline std::vector<Backend> gloo_backends(std::initializer_list<int> sizes) {
  std::vector<Backend> backends;
  if (!gloo_available()) {
    return backends;
  }
  for (const int size : sizes) {
    backends.push_back(
        {.name = "Gloo",
         .ranks = size,
         .run = &run_gloo_processes,
         .sums_in_rank_order = false,
         .checks_order = false});
  }
  backends.push_back(
      {.name = "GlooWithOrderCheck", .ranks = 3, .run = &run_checked_gloo_processes, .sums_in_rank_order = false});
  return backends;
}

} // namespace fsdp::testing
