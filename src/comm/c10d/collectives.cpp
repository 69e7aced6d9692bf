#include "comm/c10d/collectives.h"

#include <functional>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

// LibTorch 2.12 renamed what 2.11 knows by these names only; the old names are kept as aliases.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace fsdp::adapter {
namespace {

template <typename Options>
Options with_timeout(std::chrono::milliseconds timeout) {
  Options options;
  options.timeout = timeout;
  return options;
}

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
  }
  TORCH_INTERNAL_ASSERT(false, "a ReduceOp without a counterpart in c10d");
}

/// Backends say in words only that they do not have an operation.
bool says_unsupported(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.find("support") != std::string::npos || text.find("implement") != std::string::npos ||
         text.find("Could not run") != std::string::npos || text.find("No backend type") != std::string::npos;
}

/// Runs `call` unless the backend is known to lack it. Returns nothing when it does, and remembers.
template <typename Call>
Works unless_lacking(bool& lacking, Call call) {
  if (lacking) {
    return {};
  }
  try {
    return {call()};
  } catch (const c10::Error& error) {
    if (!says_unsupported(error)) {
      throw;
    }
    lacking = true;
    return {};
  }
}

/// The work of an operation that has one more step to do once the backend is done with its part.
class WithEpilogue final : public c10d::Work {
 public:
  WithEpilogue(c10::intrusive_ptr<c10d::Work> work, std::function<void()> epilogue)
      : work_(std::move(work)), epilogue_(std::move(epilogue)) {}

  bool isCompleted() override {
    return work_->isCompleted();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool finished = work_->wait(timeout);
    if (epilogue_) {
      std::exchange(epilogue_, nullptr)();
    }
    return finished;
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> epilogue_;
};

std::vector<at::Tensor> rows(const at::Tensor& tensor, int size) {
  return tensor.view({size, -1}).unbind(0);
}

} // namespace

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::chrono::milliseconds timeout)
    : process_group_(std::move(process_group)), timeout_(timeout) {}

Collectives::~Collectives() = default;

int Collectives::size() const {
  return process_group_->getSize();
}

Works Collectives::all_gather(at::Tensor output, at::Tensor input) {
  Works works = unless_lacking(lacks_flat_gather_, [&] {
    return process_group_->_allgather_base(output, input, with_timeout<c10d::AllgatherOptions>(timeout_));
  });
  return works.empty() ? all_gather_list(output, input) : works;
}

Works Collectives::all_gather_list(at::Tensor output, at::Tensor input) {
  std::vector<std::vector<at::Tensor>> outputs{rows(output, size())};
  std::vector<at::Tensor> inputs{std::move(input)};
  return {process_group_->allgather(outputs, inputs, with_timeout<c10d::AllgatherOptions>(timeout_))};
}

Works Collectives::all_gather_each(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  // On the host "coalesced" means a copy into one buffer and back, which is what a caller of this wants to avoid.
  if (!outputs.front().device().is_cpu()) {
    Works works = unless_lacking(lacks_coalesced_gather_, [&] {
      return process_group_->allgather_into_tensor_coalesced(
          outputs, inputs, with_timeout<c10d::AllgatherOptions>(timeout_));
    });
    if (!works.empty()) {
      return works;
    }
  }
  Works works;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (auto& work : all_gather(outputs[i], inputs[i])) {
      works.push_back(std::move(work));
    }
  }
  return works;
}

Works Collectives::reduce_scatter(at::Tensor output, at::Tensor input) {
  Works works = unless_lacking(lacks_flat_reduce_scatter_, [&] {
    return process_group_->_reduce_scatter_base(output, input, with_timeout<c10d::ReduceScatterOptions>(timeout_));
  });
  if (works.empty()) {
    works = unless_lacking(lacks_reduce_scatter_, [&] { return reduce_scatter_list(output, input).front(); });
  }
  return works.empty() ? all_reduce_rows(output, input) : works;
}

Works Collectives::reduce_scatter_list(at::Tensor output, at::Tensor input) {
  std::vector<at::Tensor> outputs{std::move(output)};
  std::vector<std::vector<at::Tensor>> inputs{rows(input, size())};
  return {process_group_->reduce_scatter(outputs, inputs, with_timeout<c10d::ReduceScatterOptions>(timeout_))};
}

Works Collectives::all_reduce_rows(at::Tensor output, at::Tensor input) {
  const at::Tensor mine = rows(input, size())[process_group_->getRank()];
  const auto copy_mine = [output, mine] { output.copy_(mine.view_as(output)); };
  return {c10::make_intrusive<WithEpilogue>(all_reduce(input, ReduceOp::kSum).front(), copy_mine)};
}

Works Collectives::all_to_all(at::Tensor output, at::Tensor input) {
  Works works = unless_lacking(lacks_all_to_all_, [&] {
    std::vector<int64_t> even_splits;
    return process_group_->alltoall_base(
        output, input, even_splits, even_splits, with_timeout<c10d::AllToAllOptions>(timeout_));
  });
  return works.empty() ? all_gather_rows(output, input) : works;
}

Works Collectives::all_gather_rows(at::Tensor output, at::Tensor input) {
  at::Tensor all = input.new_empty({size() * input.numel()});
  const auto copy_mine = [all, output, rank = process_group_->getRank(), size = size()] {
    output.view({size, -1}).copy_(all.view({size, size, -1}).select(1, rank));
  };
  return {c10::make_intrusive<WithEpilogue>(all_gather(all, input).front(), copy_mine)};
}

Works Collectives::all_reduce(at::Tensor tensor, ReduceOp op) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  auto options = with_timeout<c10d::AllreduceOptions>(timeout_);
  options.reduceOp = c10d_op(op);
  return {process_group_->allreduce(tensors, options)};
}

Works Collectives::broadcast(at::Tensor tensor, int root) {
  std::vector<at::Tensor> tensors{std::move(tensor)};
  auto options = with_timeout<c10d::BroadcastOptions>(timeout_);
  options.rootRank = root;
  return {process_group_->broadcast(tensors, options)};
}

Works Collectives::barrier(c10::Device device) {
  auto options = with_timeout<c10d::BarrierOptions>(timeout_);
  options.device = device;
  if (device.has_index()) {
    options.device_ids = {device.index()};
  }
  return {process_group_->barrier(options)};
}

std::string message_of(const std::exception& error) {
  const auto* from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 ? from_c10->what_without_backtrace() : error.what();
}

} // namespace fsdp::adapter
