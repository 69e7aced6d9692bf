#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// Tells whether what forwards have recorded is still there: it lives as long as its nodes that add up gradients.
class ForwardGraph {
 public:
  ForwardGraph();
  ~ForwardGraph();

  /// A forward may have used `leaf`.
  void note(const at::Tensor& leaf);
  void forget_what_is_gone();
  void clear();
  void take(ForwardGraph& other);
  bool lives() const;

 private:
  struct Nodes;
  std::unique_ptr<Nodes> nodes_;
};

} // namespace fsdp::engine
