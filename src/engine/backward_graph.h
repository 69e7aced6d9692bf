#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fsdp::engine {

/// What the backward that runs on this thread will go through: so that gradients need not be guessed from uses. Valid
/// as long as that backward.
class BackwardGraph {
 public:
  static BackwardGraph current();

  /// Differs between backwards, also nested ones.
  int id() const {
    return id_;
  }
  /// Whether more backwards may go through what this one goes through.
  bool is_kept() const {
    return kept_;
  }
  /// False where the caller gets gradients (`autograd::grad`), or has named the leaves that do.
  bool is_for_all_leaves() const {
    return wanted_ == nullptr || wanted_->empty();
  }
  /// Whether it has this leaf, whoever gets the gradient.
  bool has(const at::Tensor& leaf) const;
  /// Whether one of its nodes was made by `thread` before its node of that number, or by another thread.
  bool has_older(uint64_t number, uint64_t thread) const;
  /// Whether a gradient will be added to this leaf's.
  bool reaches(const at::Tensor& leaf) const {
    return has(leaf) && adds_to(leaf, wanted_);
  }
  /// The same of a leaf of the backward that runs, asked for each gradient.
  static bool current_adds_to(const at::Tensor& leaf);

 private:
  using Node = torch::autograd::Node;
  using Wanted = std::unordered_map<Node*, torch::autograd::GraphTask::ExecInfo>;
  static bool adds_to(const at::Tensor& leaf, const Wanted* wanted);

  int id_ = -1;
  bool kept_ = false;
  const std::unordered_set<Node*>* nodes_ = nullptr;
  const Wanted* wanted_ = nullptr; // empty: all nodes
};

} // namespace fsdp::engine
