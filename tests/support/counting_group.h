#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/decorated_group.h"

namespace fsdp::testing {

/// Counts what goes over another group.
class CountingGroup final : public DecoratedGroup {
 public:
  using DecoratedGroup::DecoratedGroup;

  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    for (const auto& whole : args.wholes) {
      reduced_bytes += static_cast<int64_t>(whole.nbytes());
    }
    return base_->reduce_scatter(std::move(args), label);
  }
  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    ++all_reduces;
    return base_->all_reduce(std::move(tensor), op, divide_by, label);
  }

  std::vector<std::string> exchange(const std::string& bytes, const Label& label) override {
    exchanged.push_back(bytes.size());
    return base_->exchange(bytes, label);
  }

  std::vector<size_t> exchanged; ///< bytes of each message
  int64_t reduced_bytes = 0; ///< of whole tensors
  int all_reduces = 0;
};

} // namespace fsdp::testing
