#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace bench {

/// Collectives that are done at once and move nothing: what is left is the work of the host. While `answers`, messages
/// (whole numbers) get the same answer from all ranks, so that a model can be sharded.
class NoOpBackend : public c10d::Backend {
 public:
  static inline bool answers = true;

  NoOpBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override {
    return "fake";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {}
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    return done();
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    if (answers && !input.is_floating_point()) {
      output.view({getSize(), -1}).copy_(input.view({1, -1}));
    }
    return done();
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::ReduceScatterOptions&) override {
    return done();
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return done();
  }

 private:
  struct Done : c10d::Work {
    bool isCompleted() override {
      return true;
    }
    bool isSuccess() const override {
      return true;
    }
    bool wait(std::chrono::milliseconds) override {
      return true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(c10::List<at::Tensor>());
      return future;
    }
  };

  static c10::intrusive_ptr<c10d::Work> done() {
    return c10::make_intrusive<Done>();
  }
};

} // namespace bench
