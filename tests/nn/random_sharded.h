#pragma once

#include "engine/unit.h"
#include "nn/random_companion.h"
#include "nn/random_trial.h"
#include "nn/slots.h"
#include "support/end_of_child.h"
#include "support/error_message.h"

namespace fsdp::testing::random {

struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The same on the calling rank of a mesh, beside what the unsharded run noted for it.
class Sharded {
 public:
  Sharded(const Program& program, BlockImpl& start, const Mesh& mesh, const Notes& notes)
      : program_(program), mesh_(mesh), notes_(notes) {
    model_ = std::make_shared<BlockImpl>(program.parts, program.width);
    const torch::NoGradGuard no_grad;
    const auto values = start.parameters();
    auto parameters = model_->parameters();
    for (size_t i = 0; i < values.size(); ++i) {
      parameters[i].copy_(values[i]);
      parameters[i].set_requires_grad(values[i].requires_grad());
    }
    model_->to(mesh.device());
    shard();
    choose_settings();
    optimize_ = make_optimizer(program_.optimizer, program_.plain_steps, shards());
    if (program_.companions > 0) {
      companion_.emplace(static_cast<int>(program_.seed), program_.companions, program_.turns_differ);
    }
  }

  /// Values are compared when all is done, so that no look at them makes the host wait for a device.
  bool compares_late = false;
  CallBeside beside = nullptr;
  /// Where autograd adds in an order that is not always the same.
  bool differs_by_roundings = false;

  void run() {
    try {
      run_steps();
    } catch (const CommError&) {
      throw; // another rank's fault
    } catch (const Mismatch&) {
      throw;
    } catch (const std::exception& error) {
      const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
      fail(of_torch == nullptr ? error.what() : of_torch->what_without_backtrace(), {});
    }
  }

 private:
  void run_steps() {
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      be_in_step(static_cast<int>(i));
      for (const auto& event : program_.steps[i].before) {
        where_ = name_of(event.what);
        const torch::NoGradGuard no_grad;
        run_event(event);
      }
      where_ = "step " + std::to_string(i);
      train(static_cast<int>(i), program_.steps[i]);
    }
    surroundings = {};
    if (position_ != notes_.size()) {
      fail("saw less than the unsharded run noted", {});
    }
    for (const auto& [where, got, wanted] : std::exchange(late_, {})) {
      where_ = where;
      expect_equal(got, wanted.value, wanted.what);
    }
  }

  void be_in_step(int step) {
    surroundings = {};
    surroundings.step = step;
    surroundings.rank = rank();
    surroundings.beside = beside;
  }

  // Making

  FullyShardOptions options_of(const UnitPlan& unit) const {
    FullyShardOptions options{.mesh = mesh_, .reshard_after_forward = unit.reshard, .mp_policy = program_.precision};
    if (program_.offload) {
      options.offload_policy = CPUOffloadPolicy{};
    }
    if (program_.last_dims) {
      options.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) {
        return ShardPlacement{.dim = std::max<int64_t>(parameter.dim() - 1, 0)};
      };
    }
    return options;
  }

  void shard() {
    const auto modules = modules_of(*model_);
    for (const auto& unit : program_.units) {
      std::vector<torch::nn::Module*> of_unit;
      for (const int index : unit.modules) {
        of_unit.push_back(modules[static_cast<size_t>(index)].get());
      }
      nn::make_unit(of_unit, options_of(unit), program_.flat);
    }
  }

  std::vector<FSDPModule> units() const {
    const auto modules = modules_of(*model_);
    std::vector<FSDPModule> units;
    for (const auto& unit : program_.units) {
      units.push_back(as_fsdp(*modules[static_cast<size_t>(unit.modules.front())]));
    }
    return units;
  }
  FSDPModule root() const {
    return as_fsdp(*model_);
  }

  void choose_settings() {
    auto all = units();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto chosen = [&](const std::vector<int>& indices) {
        std::vector<FSDPModule> units;
        for (const int index : indices) {
          units.push_back(all[static_cast<size_t>(index)]);
        }
        return units;
      };
      if (!program_.units[i].forward_prefetch.empty()) {
        all[i].set_modules_to_forward_prefetch(chosen(program_.units[i].forward_prefetch));
        all[i].set_modules_to_backward_prefetch(chosen(program_.units[i].backward_prefetch));
      }
      if (program_.divisor != 0) {
        all[i].set_gradient_divide_factor(program_.divisor);
      }
    }
    auto top = root();
    top.set_reduce_scatter_unused_params(program_.zeros);
    top.set_reshard_after_backward(!program_.stays_whole);
    top.set_separate_reduce_scatter_group(program_.separate_group);
    top.set_reduce_scatter_max_input_buffers(program_.in_flight);
  }

  // Comparing

  [[noreturn]] void fail(const std::string& what, const std::string& why) const {
    throw Mismatch("rank " + std::to_string(rank()) + ", " + where_ + ": " + what + " " + why);
  }

  const Note& next_note() {
    if (position_ == notes_.size()) {
      fail("saw more than the unsharded run noted", {});
    }
    return notes_[position_++];
  }

  void expect_equal(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) const {
    if (got.defined() != wanted.defined()) {
      fail(what, got.defined() ? "is there, unsharded not" : "is not there, unsharded it is");
    }
    if (!got.defined()) {
      return;
    }
    if (got.scalar_type() != wanted.scalar_type() || got.sizes() != wanted.sizes()) {
      fail(what, "is of another dtype or other sizes");
    }
    const auto mine = got.detach().cpu();
    const bool rounds = differs_by_roundings || program_.differs_by_roundings;
    const bool equal = rounds ? torch::allclose(mine, wanted, 1e-3, 1e-5) : torch::equal(mine, wanted);
    if (!equal) {
      std::ostringstream why;
      why << "differs by " << (mine - wanted).abs().max().item<double>() << ": " << mine << " instead of " << wanted;
      fail(what, why.str());
    }
  }

  void see(const at::Tensor& value) {
    compare(value, next_note());
  }
  void see_piece(const at::Tensor& shard, const at::Tensor& piece) {
    const Note& note = next_note();
    compare(piece, {note.what, note.value.defined() ? piece_of(shard, note.value) : note.value});
  }
  void compare(const at::Tensor& got, const Note& wanted) {
    if (compares_late) {
      const torch::NoGradGuard no_grad;
      late_.push_back({where_, got.defined() ? got.detach().clone() : got, wanted});
    } else {
      expect_equal(got, wanted.value, wanted.what);
    }
  }

  std::vector<at::Tensor> shards() const {
    std::vector<at::Tensor> shards;
    for (const auto& [name, shard] : named_parameters(*model_)) {
      shards.push_back(shard);
    }
    return shards;
  }
  /// The parameters' shards, also where users see them as one.
  std::vector<engine::Param*> params() const {
    shards(); // what members were told, they are
    std::vector<engine::Param*> params;
    for (const auto& slot : nn::slots_of(*model_)) {
      if (auto* param = engine::param_of(slot.tensor); std::find(params.begin(), params.end(), param) == params.end()) {
        params.push_back(param);
      }
    }
    return params;
  }
  void see_shards() {
    for (const auto* param : params()) {
      see_piece(param->shard(), param->shard());
    }
  }

  at::Tensor batch(int number) const {
    const auto own = shards().front().scalar_type();
    return batch_of(program_, rank(), number).to(program_.precision.param_dtype.value_or(own));
  }

  at::Tensor one_of_weights(int choice) const {
    const auto weights = weights_of(*model_);
    return weights[static_cast<size_t>(choice) % weights.size()];
  }
  void barrier_of_mesh() const {
    for (int dim = 0; dim < mesh_.ndim(); ++dim) {
      mesh_.group(dim)->barrier({"test", ""});
    }
  }

  // Events

  void run_event(const Event& event) {
    const int choice = event.choice;
    switch (event.what) {
      case What::kEvaluate:
        return evaluate(choice);
      case What::kBreakForward:
      case What::kBreakBackward:
        return break_a_step(event);
      case What::kDropLoss: {
        const torch::AutoGradMode recording(true);
        see(loss_of(*model_, batch(60)));
        root().reset_iter_state();
        return;
      }
      case What::kClone:
        return copy((choice & 1) != 0);
      case What::kSummon:
        return summon(choice);
      case What::kWriteShards:
        for (auto& shard : shards()) {
          shard.mul_(0.75);
        }
        return;
      case What::kWriteShardsRaw:
        return write_raw();
      case What::kWriteMember:
        one_of_weights(choice).mul_(0.75);
        if (program_.ranks_differ) { // the first gather after a write is all ranks', of what they all use
          for (auto& unit : units()) {
            unit.reshard();
          }
        }
        return;
      case What::kLookAlone:
        return look_alone(choice);
      case What::kReadWhole:
        for (const auto* param : params()) {
          see(sharded(param->shard()).full_tensor());
        }
        return;
      case What::kFreeze:
        return freeze(choice);
      case What::kToDouble:
        model_->to(torch::kDouble);
        model_->zero_grad();
        settle();
        optimize_ = make_optimizer(program_.optimizer, program_.plain_steps, shards());
        return;
      case What::kReplaceShards:
        for (auto& shard : shards()) {
          shard.set_data(shard.detach().clone());
        }
        return settle();
      case What::kUnshard:
        return unshard(choice);
      case What::kFork:
        return fork_children(choice);
    }
  }

  void evaluate(int choice) {
    model_->train((choice & 1) != 0);
    if ((choice & 2) != 0) {
      const c10::InferenceMode inference;
      see(loss_of(*model_, batch(50 + choice % 7)));
    } else {
      see(loss_of(*model_, batch(50 + choice % 7)));
    }
    model_->train();
  }

  void break_a_step(const Event& event) {
    const torch::AutoGradMode recording(true);
    surroundings.parts_until_interrupt = event.choice % 5;
    surroundings.interrupts_forward = event.what == What::kBreakForward;
    bool interrupted = false;
    try {
      loss_of(*model_, batch(70)).backward();
    } catch (const Interrupted&) {
      interrupted = true;
    }
    surroundings.parts_until_interrupt = -1;
    see(torch::tensor(interrupted ? 1.0 : 0.0));
    root().reset_iter_state();
    model_->zero_grad();
  }

  void copy(bool goes_on_with_it) {
    auto twin = fsdp::clone(model_);
    if (goes_on_with_it) {
      model_ = twin;
      choose_settings();
      see_shards();
      optimize_ = make_optimizer(program_.optimizer, program_.plain_steps, shards());
      return;
    }
    std::swap(model_, twin);
    see_shards();
    std::swap(model_, twin);
  }

  void summon(int choice) {
    const bool writes = (choice & 1) != 0, rank0_only = !writes && (choice & 2) != 0;
    const size_t count = params().size();
    auto guard = summon_full_params(
        *model_,
        {.writeback = writes,
         .rank0_only = rank0_only,
         .offload_to_cpu = (choice & 4) != 0,
         .with_grads = (choice & 8) != 0});
    if (rank0_only && rank() != 0) { // where parameters may be shown as one
      for (size_t i = 0; i < count; ++i) {
        next_note();
      }
      return guard.end();
    }
    std::unordered_set<const c10::TensorImpl*> seen;
    for (auto& parameter : model_->parameters()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        continue;
      }
      see(parameter);
      if (writes) {
        parameter.mul_(0.75);
      }
    }
    guard.end();
  }

  void write_raw() {
    root().note_shard_writes();
    for (auto& shard : shards()) {
      note_raw_use(shard, /*writes=*/true);
      const auto multiply = [&](auto* values) {
        for (int64_t i = 0; i < shard.numel(); ++i) {
          values[i] *= 0.75F;
        }
      };
      if (shard.scalar_type() == torch::kDouble) {
        multiply(shard.data_ptr<double>());
      } else {
        multiply(shard.data_ptr<float>());
      }
    }
  }

  void look_alone(int choice) {
    barrier_of_mesh(); // the others may be in the midst of writing
    if (rank() == choice % world_size()) {
      see(one_of_weights(choice / 4).detach().clone());
    }
    barrier_of_mesh(); // and would go on with it
  }

  /// One that computes, and one that writes to shards, which ends it where they are others' memory too.
  void fork_children(int choice) {
    barrier_of_mesh(); // or a child finds locks that its parent's other threads hold
    if (rank() == choice % world_size()) {
      const at::Tensor kept = batch(80);
      const auto computes = end_of_child([&] { kept.mul(2).sum().item(); });
      if (computes.status != 0) {
        fail("a child ended with " + std::to_string(computes.status), computes.said);
      }
      const auto writes = end_of_child([&] {
        for (auto& shard : shards()) {
          shard.zero_();
        }
      });
      if (writes.status != 0 && !contains(writes.said, "a forked child")) {
        fail("a child that wrote to shards ended with " + std::to_string(writes.status), writes.said);
      }
    }
    barrier_of_mesh();
  }

  void freeze(int choice) {
    auto weight = one_of_weights(choice);
    std::vector<bool> before;
    for (const auto& shard : shards()) { // which the members follow
      before.push_back(shard.requires_grad());
    }
    const bool trainable = !weight.requires_grad();
    weight.set_requires_grad(trainable);
    const auto now = shards(); // the shards follow
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i].requires_grad() != before[i]) {
        auto shard = now[i];
        shard.mutable_grad() = at::Tensor();
        if ((choice & 1024) != 0) { // once more, through the shard
          weight.set_requires_grad(!trainable);
          shards();
          shard.set_requires_grad(trainable);
        }
      }
    }
  }

  // Units find out about other data when they are used next; here all of them, on all ranks.
  void settle() {
    summon_full_params(*model_, {.writeback = false}).end();
  }

  void unshard(int choice) {
    auto all = units();
    const auto count = static_cast<int>(all.size());
    auto handle = all[static_cast<size_t>(choice % count)].unshard((choice & 1) != 0);
    if ((choice & 2) != 0) {
      handle.wait();
    }
    all[static_cast<size_t>(choice / 8 % count)].reshard();
  }

  // Steps

  void train(int step, const StepPlan& plan) {
    surroundings.looks = plan.looks && rank() == step % world_size();
    auto top = root();
    const MicroBatch micro_batch{
        [&](const at::Tensor& x) { return loss_of(*model_, x); },
        [&](const at::Tensor& loss) { losses_.push_back(loss); },
        [] {},
        {one_of_weights(step), one_of_weights(step + 1)}};
    const bool companion_first = (step + (program_.turns_differ ? rank() : 0)) % 2 == 0;
    if (companion_ && companion_first) {
      companion_->forward(step);
    }
    for (size_t i = 0; i < plan.micros.size(); ++i) {
      const Micro& micro = plan.micros[i];
      top.set_requires_gradient_sync(micro.syncs);
      top.set_requires_all_reduce(micro.all_reduces);
      top.set_is_last_backward(micro.is_last);
      micro_batch.run(micro.loss, batch(step * 8 + static_cast<int>(i)));
    }
    surroundings.looks = false;
    if (companion_ && !companion_first) {
      companion_->forward(step);
    }
    if (companion_) {
      companion_->backward();
    }
    for (const auto& loss : std::exchange(losses_, {})) {
      see(loss);
    }
    for (const auto* param : params()) {
      see_piece(param->shard(), param->shard_gradient());
    }
    if (program_.optimizer == Optimizer::kRaw && program_.stays_whole) {
      top.note_shard_writes(); // what is kept whole is not gathered anew else
    }
    optimize_();
    step_companion();
    see_shards();
    if (!plan.keeps_gradients) {
      model_->zero_grad(/*set_to_none=*/!plan.zeroes_gradients);
    }
  }

  /// After the model's: between the writes of two models on one group no gather may be, if the later ones are unseen.
  void step_companion() {
    if (companion_) {
      if (const auto different = companion_->step(); !different.empty()) {
        fail(different, "differs");
      }
    }
  }

  const Program& program_;
  Mesh mesh_;
  const Notes& notes_;
  size_t position_ = 0;
  std::string where_ = "sharding";
  struct Late {
    std::string where;
    at::Tensor got;
    Note wanted;
  };
  std::vector<Late> late_;
  std::shared_ptr<BlockImpl> model_;
  std::vector<at::Tensor> losses_;
  std::function<void()> optimize_;
  std::optional<Companion> companion_;
};

inline int from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

/// The programs of some seeds: FSDP_TRIALS of them, from FSDP_TRIALS_SEED on. Ends at the first that fails.
inline void run_trials(
    int trials, const Limits& limits, const std::function<void(const Program&, BlockImpl& start)>& run) {
  const int first = from_environment("FSDP_TRIALS_SEED", 1);
  for (int seed = first; seed < first + from_environment("FSDP_TRIALS", trials); ++seed) {
    torch::manual_seed(static_cast<uint64_t>(seed)); // the models' first values
    const Program program = draw_program(static_cast<uint64_t>(seed), limits);
    BlockImpl start(program.parts, program.width);
    auto parameters = start.parameters();
    for (const int index : program.frozen) {
      parameters[static_cast<size_t>(index)].set_requires_grad(false);
    }
    try {
      run(program, start);
    } catch (const std::exception& error) {
      FAIL() << program.str() << "\n" << error.what();
    }
  }
}

} // namespace fsdp::testing::random
