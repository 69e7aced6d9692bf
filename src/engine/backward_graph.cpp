#include "engine/backward_graph.h"

#include <algorithm>
#include <limits>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp::engine {

BackwardGraph BackwardGraph::current() {
  BackwardGraph graph;
  graph.id_ = torch::autograd::get_current_graph_task_id();
  if (graph.id_ >= 0) {
    graph.kept_ = torch::autograd::get_current_graph_task_keep_graph();
    graph.nodes_ = torch::autograd::get_current_graph_task_nodes_in_graph();
    graph.wanted_ = torch::autograd::get_current_graph_task_exec_info();
  }
  return graph;
}

bool BackwardGraph::has(const at::Tensor& leaf) const {
  // There is one while a graph has the leaf.
  const auto end = leaf.defined() ? torch::autograd::impl::try_get_grad_accumulator(leaf) : nullptr;
  return end != nullptr && nodes_ != nullptr && nodes_->count(end.get()) > 0;
}

bool BackwardGraph::has_older(uint64_t number, uint64_t thread) const {
  constexpr uint64_t kOfLeaf = std::numeric_limits<uint64_t>::max();
  return nodes_ != nullptr && std::any_of(nodes_->begin(), nodes_->end(), [&](const Node* node) {
           const uint64_t its = node->sequence_nr();
           return its != kOfLeaf && (its < number || node->thread_id() != thread);
         });
}

bool BackwardGraph::adds_to(const at::Tensor& leaf, const Wanted* wanted) {
  if (wanted == nullptr || wanted->empty()) { // for all leaves
    return true;
  }
  const auto found = wanted->find(torch::autograd::impl::try_get_grad_accumulator(leaf).get());
  return found != wanted->end() && found->second.needed_;
}

bool BackwardGraph::current_adds_to(const at::Tensor& leaf) {
  return adds_to(leaf, torch::autograd::get_current_graph_task_exec_info());
}

} // namespace fsdp::engine
