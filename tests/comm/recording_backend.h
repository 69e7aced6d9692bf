#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace fsdp::testing {

/// A call of a backend: what arrives at this rank, and the most elements that are counted together.
struct Recorded {
  std::string name;
  c10::ScalarType dtype;
  int64_t count;
  int64_t bytes;
};

/// A backend of as many ranks as one likes that moves nothing. `before` may throw in place of the call.
class RecordingBackend final : public c10d::Backend {
 public:
  using Backend::Backend;

  std::vector<Recorded> calls;
  std::function<void(const Recorded&)> before = [](const Recorded&) {};

  const std::string getBackendName() const override {
    return "recording";
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions&) override {
    return record("broadcast", tensors[0], tensors[0].numel());
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    return record("allreduce", tensors[0], tensors[0].numel());
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions&) override {
    return record("allgather", inputs[0], static_cast<int64_t>(outputs[0].size()) * inputs[0].numel());
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return record("_allgather_base", input, output.numel());
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return record("alltoall_base", input.view({getSize(), -1})[0], output.numel());
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>&,
      const c10d::ReduceScatterOptions&) override {
    return record("reduce_scatter", outputs[0], outputs[0].numel());
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return record("_reduce_scatter_base", output, output.numel());
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override {
      return true;
    }
    bool wait(std::chrono::milliseconds) override {
      return true;
    }
  };

  c10::intrusive_ptr<c10d::Work> record(std::string name, const at::Tensor& counted, int64_t received) {
    const Recorded call{std::move(name), counted.scalar_type(), counted.numel(), received * counted.element_size()};
    before(call);
    calls.push_back(call);
    return c10::make_intrusive<Done>();
  }
};

inline c10::intrusive_ptr<c10d::ProcessGroup> process_group_of(const c10::intrusive_ptr<RecordingBackend>& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(), backend->getSize());
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return group;
}

} // namespace fsdp::testing
