#pragma once

#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/c10d/factory.h"
#include "comm/launcher.h"
#include "comm/rendezvous.h"

namespace fsdp::testing {

/// The Gloo group of all ranks of a job.
inline std::shared_ptr<Group> gloo_group(
    const Rendezvous& rendezvous, const Launch& launch, std::chrono::milliseconds timeout) {
  const Joining joining{
      .store = rendezvous.store("gloo"),
      .rank = launch.rank,
      .size = launch.size,
      .timeout = timeout,
      .backend = "gloo",
      .label = {"init", ""}};
  return join_c10d_group(gloo_process_groups(timeout), joining);
}

} // namespace fsdp::testing
