#include <fsdp/init.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <optional>
#include <utility>

#include <unistd.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/check.h"
#include "base/env.h"
#include "base/format.h"
#include "base/log.h"
#include "comm/c10d/factory.h"
#include "comm/process.h"
#include "comm/rendezvous.h"
#include "comm/within_limit.h"
#include "comm/words.h"
#include "comm/world.h"

namespace fsdp {
namespace {

using std::chrono::milliseconds;

// How long the rank that serves the rendezvous waits for the others to leave: they are about to, or they are dead.
constexpr milliseconds kLeaveLimit{2000};

/// What `init` has to remember until `shutdown`.
struct Joined {
  InitOptions options;
  World world;
  std::unique_ptr<Rendezvous> rendezvous; ///< null in a world of one
  pid_t process = getpid();
};

std::optional<Joined>& joined() {
  static std::optional<Joined> state;
  return state;
}

thread_local const World* thread_world = nullptr;

milliseconds chosen_timeout(const InitOptions& options) {
  const bool is_default = options.timeout == InitOptions().timeout;
  return bounded(is_default ? env::seconds("FSDP_TIMEOUT").value_or(options.timeout) : options.timeout);
}

int device_count(c10::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
}

std::vector<std::string> device_types() {
  std::vector<std::string> types;
  for (int8_t i = 0; i < static_cast<int8_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES); ++i) {
    const auto type = static_cast<c10::DeviceType>(i);
    if (type != c10::kMeta && device_count(type) > 0) {
      types.push_back(c10::DeviceTypeName(type, /*lower_case=*/true));
    }
  }
  return types;
}

c10::Device parse_device(const std::string& text, const std::string& backend) {
  if (text.empty()) {
    const bool on_host = backend == "shm" || backend == "gloo";
    return !on_host && device_count(c10::kCUDA) > 0 ? c10::kCUDA : c10::kCPU;
  }
  const auto device = find_device(text);
  FSDP_CHECK(
      device && device->type() != c10::kMeta && device_count(device->type()) > 0,
      "[init] expected a device that this LibTorch and this host have ({}), got '{}'; choose one of these in "
      "InitOptions::device",
      join(device_types()),
      text);
  return *device;
}

/// Picks this rank's device of the type and makes it current.
c10::Device use_device(c10::Device device, int local_rank) {
  if (device.is_cpu()) {
    return c10::kCPU;
  }
  const int index = device.has_index() ? device.index() : local_rank;
  const int count = device_count(device.type());
  FSDP_CHECK(
      index < count,
      "[init] expected a {} device for local rank {}, but this host has {}; start at most one rank for each device",
      device.type(),
      local_rank,
      count);
  const c10::Device chosen(device.type(), static_cast<c10::DeviceIndex>(index));
  c10::impl::VirtualGuardImpl(device.type()).setDevice(chosen);
  return chosen;
}

void require_same_options(Rendezvous& rendezvous, const InitOptions& options, c10::DeviceType type) {
  const auto check_order = env::flag("FSDP_CHECK_ORDER");
  const auto mine = phrase(
      "backend='{}' on {}, FSDP_CHECK_ORDER={}",
      options.backend,
      type,
      check_order ? std::to_string(*check_order) : "(unset)");
  const auto all = rendezvous.exchange(mine);
  const auto other = std::find_if(all.begin(), all.end(), [&](const auto& text) { return text != mine; });
  FSDP_CHECK(
      other == all.end(),
      "[init] expected the same backend, kind of device and FSDP_CHECK_ORDER on all ranks, but this rank has {} and "
      "rank {} "
      "has {}; pass the same InitOptions, and set the same variables, everywhere",
      mine,
      other - all.begin(),
      *other);
}

constexpr const char* kHowToShareMemory =
    "start them in one pid namespace, as one user, without limits on file sizes and addresses (ulimit -f, ulimit -v), "
    "and not by forking a process that was a rank";

void warn_if_on_one_host(const Exchange& exchange) {
  const auto hosts = exchange(host_identity());
  if (std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host == hosts[0]; })) {
    log::warn(
        "the ranks are on one host but cannot read each other's memory, so they talk over Gloo, which is several times "
        "slower; {}",
        kHowToShareMemory);
  }
}

std::string choose_backend(const std::string& asked, c10::Device device, const Exchange& exchange) {
  if (asked.empty() && device.is_cpu()) {
    if (shm_available(exchange)) {
      return "shm";
    }
    warn_if_on_one_host(exchange);
    return "gloo";
  }
  if (asked.empty()) {
    FSDP_CHECK(
        device.is_cuda(),
        "[init] expected a device that libfsdp knows a backend for (cpu, cuda), got {}; make the c10d::ProcessGroup "
        "for it yourself and pass Mesh::from_group(process_group) to fully_shard",
        device);
    return "nccl";
  }
  if (asked == "shm") {
    FSDP_CHECK(
        device.is_cpu() && shm_available(exchange),
        "[init] expected all ranks on one host's CPU, able to read each other's memory, for the backend 'shm'; {}; or "
        "leave InitOptions::backend empty, or choose 'gloo' or 'nccl'",
        kHowToShareMemory);
  }
  return asked;
}

void require_known_backend(const std::string& backend, c10::Device device) {
  FSDP_CHECK(
      backend.empty() || backend == "shm" || backend == "gloo" || backend == "nccl",
      "[init] expected the backend 'shm', 'gloo', 'nccl' or '' (chosen by device and hosts), got '{}'",
      backend);
  FSDP_CHECK(
      backend.empty() || (backend == "nccl") == device.is_cuda(),
      "[init] expected a backend for {}, got '{}'; {}, or leave InitOptions::backend empty",
      device.type(),
      backend,
      device.is_cpu() ? "'shm' and 'gloo' are for the CPU" : "'nccl' is for CUDA");
}

std::shared_ptr<Group> make_group(
    const Launch& launch, const InitOptions& options, c10::Device device, Rendezvous& rendezvous) {
  const Exchange exchange = [&](const std::string& mine) { return rendezvous.exchange(mine); };
  const std::string backend = choose_backend(options.backend, device, exchange);
  log::info("joined {} ranks over {} on {}", launch.size, backend, device);
  if (backend == "shm") {
    return shm_group(launch.rank, launch.size, exchange, {.timeout = options.timeout, .arena = options.shared_arena});
  }
  const auto make =
      backend == "gloo" ? gloo_process_groups(options.timeout) : nccl_process_groups(device, options.timeout);
  FSDP_CHECK(
      make,
      "[init] expected a libfsdp with the backend '{}', but this one was built without its headers or against a "
      "LibTorch without it; install libgloo-dev for Gloo, libnccl-dev and a CUDA build of LibTorch for NCCL, and "
      "rebuild",
      backend);
  return join_c10d_group(
      make,
      {.store = rendezvous.store(backend),
       .rank = launch.rank,
       .size = launch.size,
       .timeout = options.timeout,
       .backend = backend,
       .label = {"init", ""}});
}

void meet_others(const Launch& launch, c10::Device device, Joined& state) {
  Rendezvous& rendezvous = *state.rendezvous;
  World& world = state.world;
  if (!launch.local_rank) {
    const auto hosts = rendezvous.exchange(host_identity());
    const auto mine = hosts.begin() + launch.rank;
    world.local_rank = static_cast<int>(std::count(hosts.begin(), mine, *mine));
  }
  world.device = use_device(device, world.local_rank);
  // The others hear in it of a rank that has no device; they do not while a group is made.
  require_same_options(rendezvous, state.options, device.type());
  world.group = make_group(launch, state.options, world.device, rendezvous);
}

std::string reason_of(const Launch& launch, const std::exception& error) {
  return phrase("rank {} gave up: {}", launch.rank, message_of(error));
}

void join_job(const Launch& launch, const InitOptions& options, c10::Device device) {
  Joined state{.options = options, .world = {}, .rendezvous = nullptr};
  World& world = state.world;
  world.local_rank = launch.local_rank.value_or(0);
  if (launch.size == 1) {
    world.group = group_of_one();
    world.device = use_device(device, world.local_rank);
  } else {
    state.rendezvous = std::make_unique<Rendezvous>(launch, options.timeout);
    try {
      meet_others(launch, device, state);
      state.rendezvous->conclude();
    } catch (const std::exception& error) {
      state.rendezvous->give_up(reason_of(launch, error));
      throw;
    }
  }
  joined() = std::move(state);
}

std::pair<InitOptions, c10::Device> resolve(InitOptions options) {
  options.timeout = chosen_timeout(options);
  if (env::flag("FSDP_ARENA") == false) {
    options.shared_arena = false;
  }
  env::flag("FSDP_CHECK_ORDER"); // which groups read later, when some ranks have joined already
  const c10::Device device = parse_device(options.device, options.backend);
  require_known_backend(options.backend, device);
  return {options, device};
}

/// What this rank was asked for, and has. If it has not, the others wait for it in vain.
std::pair<InitOptions, c10::Device> resolve_or_refuse(const Launch& launch, const InitOptions& options) {
  try {
    return resolve(options);
  } catch (const std::exception& error) {
    if (launch.size > 1) {
      refuse_to_meet(launch, options.timeout, reason_of(launch, error));
    }
    throw;
  }
}

void warn_if_different(const InitOptions& options) {
  const auto& first = joined();
  if (first && (first->options.backend != options.backend || first->options.device != options.device ||
                first->options.timeout != chosen_timeout(options))) {
    log::warn(
        "fsdp::init was called again with other options; the job goes on with backend '{}', device '{}' and a timeout "
        "of {}. Call fsdp::shutdown first to join anew",
        first->options.backend,
        first->options.device,
        in_seconds(first->options.timeout));
  }
}

// What is made before the registration, a device's driver too, is still there when `shutdown` runs.
void leave_at_exit() {
  FSDP_CHECK(std::atexit(shutdown) == 0, "[init] the C library has no room for another function to call at exit");
}

const World& require_world(const char* operation) {
  const World* world = current_world();
  FSDP_CHECK(
      world, "[{}] expected a rank of a job, but this process has not joined one; call fsdp::init() first", operation);
  return *world;
}

} // namespace

std::optional<c10::Device> find_device(const std::string& text) {
  try {
    return c10::Device(text);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

const World* current_world() {
  return thread_world ? thread_world : joined() ? &joined()->world : nullptr;
}

ThreadWorld::ThreadWorld(World world) : world_(std::move(world)), outer_(std::exchange(thread_world, &world_)) {}

ThreadWorld::~ThreadWorld() {
  thread_world = outer_;
}

void init(const InitOptions& options) {
  if (is_initialized()) {
    warn_if_different(options);
    return;
  }
  const Launch launch = read_launch();
  log::set_rank(launch.rank);
  const auto [resolved, device] = resolve_or_refuse(launch, options);
  join_job(launch, resolved, device);
  leave_at_exit();
}

bool is_initialized() {
  return current_world() != nullptr;
}

int rank() {
  return require_world("rank").group->rank();
}

int world_size() {
  return require_world("world_size").group->size();
}

int local_rank() {
  return require_world("local_rank").local_rank;
}

c10::Device device() {
  return require_world("device").device;
}

const std::shared_ptr<Group>& world() {
  return require_world("world").group;
}

void barrier() {
  require_world("barrier").group->barrier({.operation = "barrier", .unit = ""});
}

void shutdown() {
  if (!joined()) {
    return;
  }
  auto state = std::exchange(joined(), std::nullopt);
  if (state->process != getpid()) { // a forked child has nobody to take leave of, and no threads to join
    static_cast<void>(new Joined(*std::move(state)));
    return;
  }
  state->world.group.reset();
  if (state->rendezvous) {
    state->rendezvous->leave(std::min(kLeaveLimit, state->options.timeout));
  }
}

} // namespace fsdp
