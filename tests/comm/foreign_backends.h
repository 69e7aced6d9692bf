#pragma once

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/group_checks.h"
#include "comm/launcher.h"
#include "comm/rendezvous.h"
#include "support/ranks.h"

/// Process groups that libfsdp did not make.
namespace fsdp::testing {

using Gloo = c10d::ProcessGroupGloo;
using Tensors = std::vector<at::Tensor>;
using C10dWork = c10::intrusive_ptr<c10d::Work>;
using StorePointer = c10::intrusive_ptr<c10d::Store>;

/// A backend of few words: no collective on single buffers, no all-to-all, no splitting, no options. As some vendors'
/// are.
class Sparse final : public c10d::Backend {
 public:
  explicit Sparse(c10::intrusive_ptr<Gloo> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "sparse";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return nullptr;
  }
  C10dWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gloo_->allgather(outputs, inputs, options);
  }
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    all_reduced += tensors[0].numel();
    return gloo_->allreduce(tensors, options);
  }
  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return gloo_->broadcast(tensors, options);
  }
  C10dWork barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    ++allocated;
    return at::empty({size}, options);
  }
  inline static int allocated = 0; ///< tensors in memory of its own
  inline static int64_t all_reduced = 0; ///< numbers

 private:
  c10::intrusive_ptr<Gloo> gloo_;
};

template <typename Kind = Gloo>
c10::intrusive_ptr<Gloo> make_gloo(const StorePointer& store, const Launch& launch) {
  const auto options = Gloo::Options::create(std::chrono::seconds(30));
  options->devices.push_back(Gloo::createDefaultDevice());
  return c10::make_intrusive<Kind>(store, launch.rank, launch.size, options);
}

template <typename Make>
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(Rendezvous& rendezvous, const Launch& launch, Make make) {
  const auto store = rendezvous.store("foreign");
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, launch.rank, launch.size);
  const c10::intrusive_ptr<c10d::Backend> backend = make(store, launch);
  const bool is_gloo = backend->getBackendName() == "gloo";
  const auto type = is_gloo ? c10d::ProcessGroup::GLOO : c10d::ProcessGroup::CUSTOM;
  group->setBackend(c10::kCPU, type, backend);
  group->setDefaultBackend(type);
  group->setGroupName("foreign");
  rendezvous.exchange(""); // or who ends at once takes its connections from under those that still connect
  return group;
}

inline c10::intrusive_ptr<c10d::Backend> as_it_is(const StorePointer& store, const Launch& launch) {
  return make_gloo(store, launch);
}
inline c10::intrusive_ptr<c10d::Backend> sparse(const StorePointer& store, const Launch& launch) {
  return c10::make_intrusive<Sparse>(make_gloo(store, launch));
}

template <typename Make>
void run_foreign(int ranks, const RankBody& body, Make make) {
  on_processes(ranks, [&] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    body(Group::from(make_process_group(rendezvous, launch, make)));
    rendezvous.leave(std::chrono::seconds(20));
  });
}

/// A backend that does not say how long it waits gets the environment's timeout.
inline void run_sparse(int ranks, std::chrono::milliseconds timeout, const RankBody& body) {
  setenv("FSDP_TIMEOUT", std::to_string(std::chrono::duration<double>(timeout).count()).c_str(), /*overwrite=*/1);
  run_foreign(ranks, body, &sparse);
  unsetenv("FSDP_TIMEOUT");
}

} // namespace fsdp::testing
