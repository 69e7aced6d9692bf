#include "comm/c10d/collectives.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/log.h"
#include "base/view_into.h"
#include "comm/words.h"

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

/// The work of an operation that has one more step to do once the backend is done with its part.
class WithEpilogue final : public c10d::Work {
 public:
  WithEpilogue(Works works, std::function<void()> epilogue)
      : works_(std::move(works)), epilogue_(std::move(epilogue)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool finished =
        std::all_of(works_.begin(), works_.end(), [&](const auto& work) { return work->wait(timeout); });
    if (epilogue_) {
      epilogue_();
      epilogue_ = nullptr; // not before it has succeeded: who asks again is not told that all is done
    }
    return finished;
  }

 private:
  Works works_;
  std::function<void()> epilogue_;
};

std::vector<at::Tensor> rows(const at::Tensor& tensor, int size) {
  return tensor.view({size, -1}).unbind(0);
}

constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max();

/// For what is only moved, in parts of `unit` elements: too many elements become fewer, wider ones, if they can.
void widen(std::initializer_list<at::Tensor*> tensors, int64_t unit) {
  constexpr int64_t kWord = sizeof(int64_t);
  const auto fit = [](const at::Tensor* tensor) { return tensor->numel() <= kMostElements; };
  const auto starts_word = [](const at::Tensor* tensor) {
    return tensor->storage_offset() * tensor->element_size() % kWord == 0;
  };
  const int64_t item = (*tensors.begin())->element_size();
  if (unit * item % kWord == 0 && !std::all_of(tensors.begin(), tensors.end(), fit) &&
      std::all_of(tensors.begin(), tensors.end(), starts_word)) {
    for (at::Tensor* tensor : tensors) {
      *tensor = view_into(*tensor, at::kLong, tensor->numel() * item / kWord);
    }
  }
}

/// Calls `start(begin, length)` for parts of so many elements that no part has too many.
template <typename Start>
Works in_parts(int64_t count, const Start& start) {
  Works works;
  for (int64_t begin = 0; begin < count; begin += kMostElements) {
    for (auto& work : start(begin, std::min(kMostElements, count - begin))) {
      works.push_back(std::move(work));
    }
  }
  return works;
}

at::Tensor part_of(const at::Tensor& tensor, int64_t begin, int64_t length) {
  return length == tensor.numel() ? tensor : view_into(tensor, tensor.scalar_type(), length, begin);
}

std::vector<at::Tensor> parts_of_rows(const at::Tensor& tensor, int size, int64_t begin, int64_t length) {
  std::vector<at::Tensor> parts = rows(tensor, size);
  for (at::Tensor& part : parts) {
    part = part_of(part, begin, length);
  }
  return parts;
}

} // namespace

Collectives::Collectives(c10::intrusive_ptr<c10d::ProcessGroup> process_group, std::chrono::milliseconds timeout)
    : process_group_(std::move(process_group)), timeout_(timeout) {}

Collectives::~Collectives() = default;

int Collectives::size() const {
  return process_group_->getSize();
}

// A backend says that it lacks an operation by an exception from the call, so the first call for a dtype decides.
// Failures of the network, of the library below, of the device and of memory have types of their own. If one rank alone
// fails otherwise in a first call, it goes another way than the others, and all end in the timeout.
template <typename Call>
Works Collectives::unless_lacking(Operation operation, const at::Tensor& tensor, const Call& call) {
  Support& support = support_[operation][static_cast<size_t>(tensor.scalar_type())][tensor.device().is_cpu()];
  if (support == Support::kLacking) {
    return {};
  }
  try {
    Works works = call();
    support = Support::kThere;
    return works;
  } catch (const c10::DistError&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const std::exception& error) {
    if (support == Support::kThere) {
      throw;
    }
    log::info(
        "{} refuses a collective of {} numbers, for which others are used: {}",
        process_group_->getBackendName(),
        c10::toString(tensor.scalar_type()),
        message_of(error));
    support = Support::kLacking;
    return {};
  }
}

Works Collectives::all_gather(at::Tensor output, at::Tensor input) {
  widen({&output, &input}, input.numel());
  if (input.numel() > kMostElements) {
    return all_gather_list(output, input);
  }
  Works works = unless_lacking(kFlatGather, input, [&]() -> Works {
    return {process_group_->_allgather_base(output, input, with_timeout<c10d::AllgatherOptions>(timeout_))};
  });
  return works.empty() ? all_gather_list(output, input) : works;
}

Works Collectives::all_gather_list(at::Tensor output, at::Tensor input) {
  return in_parts(input.numel(), [&](int64_t begin, int64_t length) -> Works {
    std::vector<std::vector<at::Tensor>> outputs{parts_of_rows(output, size(), begin, length)};
    std::vector<at::Tensor> inputs{part_of(input, begin, length)};
    return {process_group_->allgather(outputs, inputs, with_timeout<c10d::AllgatherOptions>(timeout_))};
  });
}

Works Collectives::all_gather_each(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  // On the host "coalesced" means a copy into one buffer and back, which is what a caller of this wants to avoid.
  if (!outputs.front().device().is_cpu()) {
    Works works = unless_lacking(kCoalescedGather, inputs.front(), [&]() -> Works {
      return {process_group_->allgather_into_tensor_coalesced(
          outputs, inputs, with_timeout<c10d::AllgatherOptions>(timeout_))};
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
  Works works;
  if (input.numel() <= kMostElements) {
    works = unless_lacking(kFlatReduceScatter, input, [&]() -> Works {
      return {process_group_->_reduce_scatter_base(output, input, with_timeout<c10d::ReduceScatterOptions>(timeout_))};
    });
  }
  if (works.empty()) {
    works = unless_lacking(kReduceScatter, input, [&] { return reduce_scatter_list(output, input); });
  }
  return works.empty() ? all_reduce_rows(output, input) : works;
}

Works Collectives::reduce_scatter_list(at::Tensor output, at::Tensor input) {
  return in_parts(output.numel(), [&](int64_t begin, int64_t length) -> Works {
    std::vector<at::Tensor> outputs{part_of(output, begin, length)};
    std::vector<std::vector<at::Tensor>> inputs{parts_of_rows(input, size(), begin, length)};
    return {process_group_->reduce_scatter(outputs, inputs, with_timeout<c10d::ReduceScatterOptions>(timeout_))};
  });
}

Works Collectives::all_reduce_rows(at::Tensor output, at::Tensor input) {
  const at::Tensor mine = rows(input, size())[process_group_->getRank()];
  const auto copy_mine = [output, mine] { output.copy_(mine.view_as(output)); };
  return {c10::make_intrusive<WithEpilogue>(all_reduce(input, ReduceOp::kSum), copy_mine)};
}

Works Collectives::all_to_all(at::Tensor output, at::Tensor input) {
  widen({&output, &input}, input.numel() / size());
  Works works;
  if (input.numel() / size() <= kMostElements) {
    works = unless_lacking(kAllToAll, input, [&]() -> Works {
      std::vector<int64_t> even_splits;
      return {process_group_->alltoall_base(
          output, input, even_splits, even_splits, with_timeout<c10d::AllToAllOptions>(timeout_))};
    });
  }
  return works.empty() ? all_gather_rows(output, input) : works;
}

Works Collectives::all_gather_rows(at::Tensor output, at::Tensor input) {
  at::Tensor all = input.new_empty({size() * input.numel()});
  const auto copy_mine = [all, output, rank = process_group_->getRank(), size = size()] {
    output.view({size, -1}).copy_(all.view({size, size, -1}).select(1, rank));
  };
  return {c10::make_intrusive<WithEpilogue>(all_gather(all, input), copy_mine)};
}

Works Collectives::all_reduce(at::Tensor tensor, ReduceOp op) {
  auto options = with_timeout<c10d::AllreduceOptions>(timeout_);
  options.reduceOp = c10d_op(op);
  return in_parts(tensor.numel(), [&](int64_t begin, int64_t length) -> Works {
    std::vector<at::Tensor> tensors{part_of(tensor, begin, length)};
    return {process_group_->allreduce(tensors, options)};
  });
}

Works Collectives::broadcast(at::Tensor tensor, int root) {
  widen({&tensor}, tensor.numel());
  auto options = with_timeout<c10d::BroadcastOptions>(timeout_);
  options.rootRank = root;
  return in_parts(tensor.numel(), [&](int64_t begin, int64_t length) -> Works {
    std::vector<at::Tensor> tensors{part_of(tensor, begin, length)};
    return {process_group_->broadcast(tensors, options)};
  });
}

Works Collectives::barrier(c10::Device device) {
  auto options = with_timeout<c10d::BarrierOptions>(timeout_);
  options.device = device;
  if (device.has_index()) {
    options.device_ids = {device.index()};
  }
  return {process_group_->barrier(options)};
}

} // namespace fsdp::adapter
