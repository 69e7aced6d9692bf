#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/group.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/env.h"
#include "base/log.h"
#include "comm/arguments.h"
#include "comm/c10d/channel.h"
#include "comm/c10d/factory.h"
#include "comm/c10d/over_channel.h"
#include "comm/within_limit.h"

namespace fsdp {
namespace {

using adapter::Channel;
using adapter::Collectives;

constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(10);
constexpr auto kGlooThread = "gloo_tcp_loop";

// The end of a process group waits for its threads, which may need the caller's lock to get there: they let go of what
// they kept of Python. A forked child leaves it alone: those threads do not exist there, and a lock may be held for
// ever.
std::shared_ptr<Channel> make_channel(ProcessGroupPtr process_group, const C10dOptions& options) {
  auto channel = std::make_unique<Channel>(std::move(process_group), options.timeout, options.ours);
  return {channel.release(), [](Channel* ending) {
            if (ending->process() != getpid()) {
              return;
            }
            const WithoutCallersLock no_callers_lock;
            const std::unique_ptr<Channel> owned(ending);
          }};
}

at::Tensor bytes_tensor(const std::string& bytes, int64_t padded, c10::Device device) {
  at::Tensor tensor = at::zeros({padded}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor.to(device);
}

/// No split of the process group has had it, nor one through a `Group` that is gone: what those left in the store stays
/// there, and a rank that read it would look for its peers at addresses of the past.
int64_t new_split_number(const c10d::ProcessGroup& process_group, std::chrono::milliseconds timeout) {
  const auto store = process_group.getStore();
  return answer_of<int64_t>(timeout, [store] { return store ? store->add("libfsdp/splits", 1) : 0; });
}

/// Memory of the backend for the buffer's device; LibTorch's where that backend has none or is not to be found.
adapter::BufferPool::Allocate backend_memory(const ProcessGroupPtr& process_group) {
  return [process_group](int64_t bytes, const at::TensorOptions& options) {
    c10::intrusive_ptr<c10d::Backend> backend;
    try {
      backend = process_group->getBackend(options.device().type());
    } catch (const c10::Error&) { // there is none
    }
    const bool allocates = backend && backend->supportsTensorAlloc(options.device().index());
    return allocates ? backend->allocateTensor(bytes, options) : at::empty({bytes}, options);
  };
}

ProcessGroupPtr without_gloo(const StorePtr&, int, int) {
  FSDP_CHECK(
      false,
      "[split] expected a libfsdp that makes Gloo groups, but this one was built without Gloo's headers; install "
      "libgloo-dev and rebuild, or make one process group per mesh dimension and use Mesh::from_groups");
}

/// Any c10d backend behind the interface of the engine.
class C10dGroup final : public Group {
 public:
  C10dGroup(ProcessGroupPtr process_group, const C10dOptions& options)
      : Group(process_group->getRank(), process_group->getSize(), adapter::backend_name(*process_group)),
        channel_(make_channel(process_group, options)),
        options_(options) {
    set_backend_memory(options.backend_memory);
  }

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    channel_->require_device(options.device, label);
    check_pieces(pieces, size(), label);
    return adapter::make_private_home(channel_, std::move(pieces), options);
  }

  bool gathers_in_place() const override {
    return false;
  }

  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    check_reduce_scatter(args, rank(), size(), label);
    return adapter::start_reduce_scatter(channel_, std::move(args), label);
  }

  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    announce_write(tensor);
    return adapter::start_all_reduce(channel_, std::move(tensor), op, divide_by, label);
  }

  void broadcast(at::Tensor tensor, int root, const Label& label) override {
    announce_write(tensor);
    check_root(root, size(), label);
    check_plain_memory(tensor, label);
    if (tensor.numel() == 0) {
      return;
    }
    // As bytes: any dtype can be copied, not every backend knows every dtype.
    const at::Tensor bytes = tensor.detach().view({-1}).view(at::kByte);
    channel_->run(
        label, "broadcast", tensor.device(), bytes.numel(), [&](Collectives& c) { return c.broadcast(bytes, root); });
  }

  void barrier(const Label& label) override {
    const c10::Device device = channel_->control_device();
    channel_->run(label, "barrier", device, 0, [&](Collectives& c) { return c.barrier(device); });
    channel_->require_unbroken(label, "barrier");
  }

  std::vector<std::string> exchange(const std::string& bytes, const Label& label) override {
    const c10::Device device = channel_->control_device();
    const auto gather = [&](const at::Tensor& mine) {
      at::Tensor all = mine.new_empty({size() * mine.numel()});
      channel_->run(label, "exchange", device, mine.nbytes(), [&](Collectives& c) { return c.all_gather(all, mine); });
      const at::Tensor received = all.cpu();
      channel_->require_unbroken(label, "exchange");
      return received;
    };
    return channel_->guarded(label, "exchange", [&] {
      const at::Tensor sizes = gather(at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong).to(device));
      const int64_t longest = sizes.max().item<int64_t>();
      TORCH_CHECK(sizes.min().item<int64_t>() >= 0, "a rank announced a negative number of bytes");
      std::vector<std::string> result(size());
      if (longest == 0) {
        return result;
      }
      const at::Tensor all = gather(bytes_tensor(bytes, longest, device));
      const char* from = static_cast<const char*>(all.const_data_ptr());
      for (int rank = 0; rank < size(); ++rank) {
        result[rank].assign(from + rank * longest, sizes[rank].item<int64_t>());
      }
      return result;
    });
  }

  std::shared_ptr<Group> split(int color, const Label& label) override {
    channel_->require_own(label);
    const auto new_number = [&] { return new_split_number(*channel_->process_group(), channel_->timeout()); };
    const auto mine = rank() == 0 ? channel_->guarded(label, "split", new_number) : 0;
    const auto members = ranks_of_color(*this, color, label);
    const auto told = exchange(phrase("{} {}", members.size(), mine), label);
    const bool all_alone =
        std::all_of(told.begin(), told.end(), [](const auto& text) { return text.starts_with("1 "); });
    if (members.size() == 1 && (options_.make_process_group || all_alone)) {
      return group_of_one();
    }
    const auto number = told[0].substr(told[0].find(' ') + 1);
    auto options = options_;
    options.ours = true; // nobody else has the part
    const auto part = c10d_group(make_part(members, phrase("{}/{}", number, members.front()), label), options);
    return members.size() == 1 ? group_of_one() : part; // a process group is split by all of its ranks
  }

  void abort(const std::string& reason) override {
    channel_->abort(reason);
  }

  void set_backend_memory(bool enable) {
    options_.backend_memory = enable;
    channel_->pool().set_allocator(enable ? backend_memory(channel_->process_group()) : nullptr);
  }

  c10::Device device() const {
    return adapter::training_device(*channel_->process_group());
  }

 private:
  /// As the backend splits itself. `part`: a name for it within this process group.
  MakeProcessGroup splitting(const std::vector<int>& members, const std::string& part, const Label& label) const {
    const auto& parent = channel_->process_group();
    // Asked before splitGroup asks, which first reads the backend's options, and some backends have none.
    FSDP_CHECK(
        parent->getStore() &&
            channel_->guarded(label, "split", [&] { return parent->getDefaultBackend()->supportsSplitting(); }),
        "[{}] expected a process group that can be split, but the {} group cannot: its backend does not support "
        "splitting, or it has no store; make one process group per mesh dimension and use Mesh::from_groups",
        label.operation,
        name());
    const auto name = phrase("libfsdp/{}/{}", parent->getGroupName(), part);
    return [parent, members, name, device = device(), timeout = options_.timeout](const StorePtr&, int, int) {
      const c10::DeviceGuard guard(device); // on a thread of its own
      return parent->splitGroup(members, timeout, std::nullopt, name, std::nullopt);
    };
  }

  ProcessGroupPtr make_part(const std::vector<int>& members, const std::string& part, const Label& label) {
    const auto& make = options_.make_process_group;
    const auto index = std::find(members.begin(), members.end(), rank()) - members.begin();
    const Joining joining{
        .store = c10::make_intrusive<c10d::PrefixStore>("split/" + part, channel_->process_group()->getStore()),
        .rank = static_cast<int>(index),
        .size = static_cast<int>(members.size()),
        .timeout = channel_->timeout(),
        .backend = name(),
        .label = label};
    try {
      const WithoutCallersLock no_callers_lock; // which a backend of the caller's may need
      return join_group(make ? make : splitting(members, part, label), joining);
    } catch (const CommError& error) {
      channel_->abort(error.what()); // the ranks that are not of the part have to know too
      throw CommError(error.what() + std::string(adapter::kStartAgain));
    }
  }

  std::shared_ptr<Channel> channel_;
  C10dOptions options_;
};

/// How long the group waits; FSDP_TIMEOUT or ten minutes where its backend does not say.
std::chrono::milliseconds timeout_of(const c10d::ProcessGroup& group) {
  try {
    if (const auto options = group.getDefaultBackend()->getBackendOptions()) {
      return bounded(options->timeout);
    }
  } catch (const c10::Error&) { // the backend does not say
  }
  return env::seconds("FSDP_TIMEOUT").value_or(kDefaultTimeout);
}

/// Gloo writes to connections whose other end may have died. By default that ends the process without a word; ignored,
/// the write fails, and the failure becomes an error like others. A program that has set a handler keeps it.
void ignore_broken_pipes() {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) {
    std::signal(SIGPIPE, SIG_IGN);
  }
}

std::string name_of(const std::filesystem::path& thread) {
  std::string name;
  std::getline(std::ifstream(thread / "comm"), name);
  return name;
}

/// How this rank would join others by shared memory.
struct SharedMemory {
  bool wanted;
  ShmOptions options;
};

SharedMemory read_environment(std::chrono::milliseconds timeout) {
  const ShmOptions options{
      .timeout = env::seconds("FSDP_TIMEOUT").value_or(timeout), .arena = env::flag("FSDP_ARENA").value_or(true)};
  return {.wanted = env::flag("FSDP_SHM").value_or(true), .options = options};
}

/// What this rank cannot read the others may: they are told, or they would wait for it.
SharedMemory read_environment_or_abort(Group& group, std::chrono::milliseconds timeout) {
  try {
    return read_environment(timeout);
  } catch (const Error& error) {
    group.abort(error.what());
    throw;
  }
}

} // namespace

std::shared_ptr<Group> Group::from(ProcessGroupPtr process_group) {
  FSDP_CHECK(process_group, "[Group::from] expected a process group, got null");
  if (process_group->getSize() == 1) {
    return group_of_one();
  }
  const auto timeout = timeout_of(*process_group);
  C10dOptions options{.timeout = timeout};
  if (adapter::backend_name(*process_group) == "gloo" && process_group->getStore()) {
    options.make_process_group = gloo_process_groups(timeout); // Gloo's own split has been seen to hang
    if (!options.make_process_group) {
      options.make_process_group = without_gloo;
    }
  }
  return c10d_group(std::move(process_group), options);
}

std::shared_ptr<Group> Group::nearest(ProcessGroupPtr process_group, c10::Device device) {
  auto group = from(process_group);
  if (group->size() == 1 || !device.is_cpu()) {
    return group;
  }
  const SharedMemory shared = read_environment_or_abort(*group, timeout_of(*process_group));
  const Exchange exchange = [&](const std::string& mine) {
    return group->exchange(shared.wanted ? mine : "", {"join shared memory", ""}); // who shows nothing is not seen
  };
  if (!shm_available(exchange)) {
    return group;
  }
  log::info("rank {} of {} goes over shared memory instead of {}", group->rank(), group->size(), group->name());
  return shm_group(group->rank(), group->size(), exchange, shared.options);
}

void let_gloo_threads_stand_back() {
  std::error_code error; // without /proc nothing changes
  for (std::filesystem::directory_iterator thread("/proc/self/task", error), end; !error && thread != end;
       thread.increment(error)) {
    const pid_t id = std::atoi(thread->path().filename().c_str());
    if (name_of(thread->path()) == kGlooThread && sched_getscheduler(id) == SCHED_OTHER) {
      const sched_param usual{};
      static_cast<void>(sched_setscheduler(id, SCHED_BATCH, &usual));
    }
  }
}

std::shared_ptr<Group> c10d_group(ProcessGroupPtr process_group, const C10dOptions& options) {
  ignore_broken_pipes();
  let_gloo_threads_stand_back();
  return std::make_shared<C10dGroup>(std::move(process_group), options);
}

std::shared_ptr<Group> join_c10d_group(const MakeProcessGroup& make, const Joining& joining) {
  ignore_broken_pipes(); // ranks may die while they join
  return c10d_group(join_group(make, joining), {.timeout = joining.timeout, .make_process_group = make, .ours = true});
}

void set_backend_memory(Group& group, bool enable) {
  if (auto* c10d = dynamic_cast<C10dGroup*>(&group)) {
    c10d->set_backend_memory(enable);
  }
}

std::optional<c10::Device> c10d_device(const Group& group) {
  const auto* c10d = dynamic_cast<const C10dGroup*>(&group);
  return c10d ? std::optional(c10d->device()) : std::nullopt;
}

} // namespace fsdp
