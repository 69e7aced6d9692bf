#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

namespace fsdp::optim {

/// All parameters as one vector, of which each rank has its shards. Vectors are flat tensors in one order; their
/// products and norms are of the whole vector, the same on every rank.
class FlatShards {
 public:
  /// Each parameter once. Replicated and plain parameters, which all ranks have alike, are counted once.
  explicit FlatShards(const std::vector<at::Tensor>& parameters);

  /// Zeros where there is no gradient.
  at::Tensor gradients() const;
  at::Tensor values() const;
  void set_values(const at::Tensor& values) const;
  /// parameters += direction * step
  void move(const at::Tensor& direction, double step) const;

  double dot(const at::Tensor& a, const at::Tensor& b) const;
  double largest(const at::Tensor& vector) const; ///< absolute value
  double sum_of_absolutes(const at::Tensor& vector) const;
  /// Over all ranks of the biggest mesh: gradients are averages over the same ranks.
  double average_over_ranks(double value) const;

 private:
  using Groups = std::vector<std::shared_ptr<Group>>;
  /// Parameters that are cut over the same ranks; exists on each of them, though it may hold nothing there.
  struct Family {
    Groups cut_over;
    c10::Device device;
    int64_t numel = 0;
    std::vector<at::Tensor> parameters{};
  };

  Family& family_for(const at::Tensor& parameter);
  void for_each(const at::Tensor& vector, const std::function<void(const at::Tensor&, const at::Tensor&)>& act) const;
  template <typename Part>
  double combine(ReduceOp op, const Part& part) const;

  std::vector<Family> families_;
  Groups all_ranks_; // of the biggest mesh
  c10::Device device_;
};

} // namespace fsdp::optim
