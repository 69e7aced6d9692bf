#pragma once

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing::random {

/// Another model, of one unit, that is trained in between: over all ranks, or over each half.
class Companion {
 public:
  Companion(int seed, int parts, bool own_group) : seed_(seed), mesh_(mesh_of(parts, own_group)) {
    for (const auto& model : {model_.ptr(), reference_.ptr()}) {
      model->to(torch::kDouble);
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.copy_(subjects::data(0, seed_ % 100, parameter.sizes().vec()));
      }
    }
    fully_shard(*model_, {.mesh = mesh_});
  }

  void forward(int step) {
    step_ = step;
    loss_ = loss_of(*model_, mesh_.coordinate());
  }

  void backward() {
    loss_.backward();
    const int ranks = mesh_.group()->size();
    for (int rank = 0; rank < ranks; ++rank) {
      (loss_of(*reference_, rank) / ranks).backward();
    }
  }

  /// What differs from unsharded training, if anything does.
  std::string step() {
    const torch::NoGradGuard no_grad;
    std::string different;
    auto shards = model_->parameters(), wholes = reference_->parameters();
    for (size_t i = 0; i < shards.size(); ++i) {
      shards[i].sub_(shards[i].grad(), 0.125);
      wholes[i].sub_(wholes[i].grad(), 0.125);
      if (!torch::allclose(shards[i], piece_of(shards[i], wholes[i]), 1e-9, 1e-12)) {
        different += "parameter " + std::to_string(i) + " of the other model ";
      }
    }
    model_->zero_grad();
    reference_->zero_grad();
    loss_of(*model_, 0); // after which the next forward waits for no writer: ranks may come to it in any order
    return different;
  }

 private:
  static Mesh mesh_of(int parts, bool own_group) {
    if (own_group) {
      const int part = rank() * parts / world_size();
      return Mesh::from_groups({world()->split(part, {"test", "companion"})}, {"shard"}, c10::kCPU);
    }
    return init_device_mesh("cpu", {parts, world_size() / parts}, {"part", "shard"})["shard"];
  }
  at::Tensor loss_of(torch::nn::LinearImpl& model, int rank) const {
    return model.forward(subjects::data(rank, seed_ % 50 + step_, {2, 4}).to(torch::kDouble)).square().mean();
  }

  int seed_;
  Mesh mesh_;
  torch::nn::Linear model_{4, 12}, reference_{4, 12}; // each of four ranks has a piece
  int step_ = 0;
  at::Tensor loss_;
};

} // namespace fsdp::testing::random
