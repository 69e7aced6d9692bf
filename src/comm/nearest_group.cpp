#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/group.h>

#include "base/env.h"
#include "base/log.h"
#include "comm/c10d/factory.h"

namespace fsdp {

std::shared_ptr<Group> Group::nearest(c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device) {
  const auto timeout = timeout_of(*process_group);
  auto group = from(std::move(process_group));
  if (group->size() == 1 || !device.is_cpu()) {
    return group;
  }
  const bool wanted = env::flag("FSDP_SHM").value_or(true);
  const Exchange exchange = [&](const std::string& mine) {
    return group->exchange(wanted ? mine : "", {"join shared memory", ""}); // who shows nothing is not seen
  };
  if (!shm_available(exchange)) {
    return group;
  }
  log::info("rank {} of {} goes over shared memory instead of {}", group->rank(), group->size(), group->name());
  ShmOptions options;
  options.timeout = env::seconds("FSDP_TIMEOUT").value_or(timeout);
  options.arena = env::flag("FSDP_ARENA").value_or(true);
  return shm_group(group->rank(), group->size(), exchange, options);
}

} // namespace fsdp
