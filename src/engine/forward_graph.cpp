#include "engine/forward_graph.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <torch/csrc/autograd/variable.h>

namespace fsdp::engine {

namespace {

using WeakNode = decltype(torch::autograd::AutogradMeta::grad_accumulator_); // another one in older LibTorch

bool is_gone(const WeakNode& node) {
  return node.expired();
}

} // namespace

struct ForwardGraph::Nodes {
  std::vector<WeakNode> all;
};

ForwardGraph::ForwardGraph() : nodes_(std::make_unique<Nodes>()) {}

ForwardGraph::~ForwardGraph() = default;

void ForwardGraph::note(const at::Tensor& leaf) {
  if (auto* autograd = leaf.defined() ? torch::autograd::impl::get_autograd_meta(leaf) : nullptr) {
    const std::lock_guard lock(autograd->mutex_);
    if (!is_gone(autograd->grad_accumulator_)) {
      nodes_->all.push_back(autograd->grad_accumulator_);
    }
  }
}

void ForwardGraph::forget_what_is_gone() {
  std::erase_if(nodes_->all, is_gone);
}

void ForwardGraph::clear() {
  nodes_->all.clear();
}

void ForwardGraph::take(ForwardGraph& other) {
  nodes_->all.insert(nodes_->all.end(), other.nodes_->all.begin(), other.nodes_->all.end());
  other.clear();
}

bool ForwardGraph::lives() const {
  return !std::all_of(nodes_->all.begin(), nodes_->all.end(), is_gone);
}

} // namespace fsdp::engine
