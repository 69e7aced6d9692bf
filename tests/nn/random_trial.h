#pragma once

#include "nn/random_program.h"
#include "nn/subjects.h"

/// Runs what was drawn: unsharded first, which notes what every rank has to see, then sharded, on each rank.
namespace fsdp::testing::random {

/// What a rank is to see, in order. Parameters and gradients are noted whole.
struct Note {
  std::string what;
  at::Tensor value;
};
using Notes = std::vector<Note>;

/// Tells whoever watches memory of a use that no operator shows.
inline std::function<void(const at::Tensor&, bool writes)> note_raw_use = [](const at::Tensor&, bool) {};

/// Decays to a half and follows a gradient with momentum, so that no element stays as it was; or, if plain, follows it
/// only. Products are exact, so that it does not matter what computes them.
class SimpleOptimizer {
 public:
  SimpleOptimizer(std::vector<at::Tensor> parameters, bool plain, bool raw)
      : parameters_(std::move(parameters)), plain_(plain), raw_(raw) {
    velocities_.resize(parameters_.size());
  }

  void step() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor gradient = parameters_[i].grad();
      if (!gradient.defined()) {
        continue;
      }
      auto& velocity = velocities_[i];
      velocity = velocity.defined() && !plain_ ? velocity * 0.5 + gradient : gradient.clone();
      if (!raw_) {
        parameters_[i].sub_(velocity, 0.125);
        if (!plain_) {
          parameters_[i].sub_(parameters_[i] - 0.5, 0.0625);
        }
      } else if (parameters_[i].scalar_type() == torch::kDouble) {
        write_raw<double>(parameters_[i], velocity);
      } else {
        write_raw<float>(parameters_[i], velocity);
      }
    }
  }

 private:
  template <typename T>
  void write_raw(at::Tensor& parameter, const at::Tensor& velocity) const {
    const at::Tensor steps = at::empty_like(parameter).copy_(velocity); // strides as the parameter's
    note_raw_use(steps, /*writes=*/false);
    note_raw_use(parameter, /*writes=*/true);
    T* const values = parameter.data_ptr<T>();
    const T* const velocities = steps.data_ptr<T>();
    for (int64_t i = 0; i < parameter.numel(); ++i) {
      values[i] -= T(0.125) * velocities[i];
      values[i] -= plain_ ? T(0) : T(0.0625) * (values[i] - T(0.5));
    }
  }

  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> velocities_;
  bool plain_;
  bool raw_;
};

inline std::function<void()> make_optimizer(Optimizer kind, bool plain, const std::vector<at::Tensor>& parameters) {
  if (kind == Optimizer::kAdamW) {
    auto optimizer =
        std::make_shared<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1.0 / 64).eps(1.0 / 64));
    return [optimizer] { optimizer->step(); };
  }
  auto optimizer = std::make_shared<SimpleOptimizer>(parameters, plain, kind == Optimizer::kRaw);
  return [optimizer] { optimizer->step(); };
}

inline at::Tensor batch_of(const Program& program, int rank, int number) {
  return subjects::data(rank, number + static_cast<int>(program.seed % 1000) * 7, {kRows, kLength, program.width});
}

/// `after_backward` is called after each; `seen` is given the losses.
class MicroBatch {
 public:
  std::function<at::Tensor(const at::Tensor&)> loss_of;
  std::function<void(const at::Tensor&)> seen;
  std::function<void()> after_backward;
  std::vector<at::Tensor> weights; ///< for a penalty

  void run(Loss kind, const at::Tensor& x) const {
    switch (kind) {
      case Loss::kTwo: {
        const auto first = loss(x), second = loss(x * 2);
        return backward(first + second);
      }
      case Loss::kRetained: {
        const auto only = loss(x);
        backward(only, /*retain=*/true);
        return backward(only);
      }
      case Loss::kForwardForward: {
        const auto first = loss(x), second = loss(x * 2);
        backward(first);
        return backward(second);
      }
      case Loss::kPenaltyOnInput:
        return with_penalty(x.clone().requires_grad_(), {});
      case Loss::kPenaltyOnWeights:
        return with_penalty(x.clone().requires_grad_(), weights);
      default:
        return backward(loss(x));
    }
  }

 private:
  at::Tensor loss(const at::Tensor& x) const {
    auto value = loss_of(x);
    seen(value.detach());
    return value;
  }
  void backward(const at::Tensor& value, bool retain = false) const {
    value.backward({}, retain);
    after_backward();
  }
  void with_penalty(const at::Tensor& x, std::vector<at::Tensor> to) const {
    auto total = loss(x);
    to.push_back(x);
    std::erase_if(to, [](const at::Tensor& tensor) { return !tensor.requires_grad(); });
    const auto slopes = torch::autograd::grad({total}, to, {}, /*retain_graph=*/true, /*create_graph=*/true, true);
    for (const auto& slope : slopes) {
      if (slope.defined()) {
        total = total + slope.to(total.scalar_type()).pow(2).sum();
      }
    }
    seen(total.detach());
    backward(total);
  }
};

/// The loss, for which the model's parameters are of the dtype that it computes in.
inline at::Tensor loss_of(BlockImpl& model, const at::Tensor& x) {
  const auto loss = model.forward(x).to(torch::kDouble).pow(2).mean();
  const auto nothing = torch::zeros({}, torch::TensorOptions().dtype(torch::kDouble).device(x.device()));
  return c10::GradMode::is_enabled() ? loss + nothing.requires_grad_() : loss; // all may be frozen
}

inline std::vector<at::Tensor> weights_of(const BlockImpl& model) {
  std::vector<at::Tensor> weights;
  for (const auto& leaf : leaves_of(model)) {
    if (leaf->weight().defined()) {
      weights.push_back(leaf->weight());
    }
  }
  return weights;
}

// --- unsharded

class Unsharded {
 public:
  Unsharded(const Program& program, BlockImpl& start, c10::Device device)
      : program_(program),
        model_(std::make_shared<BlockImpl>(program.parts, program.width)),
        notes_(static_cast<size_t>(program.arrangement.ranks())) {
    {
      const torch::NoGradGuard no_grad;
      const auto values = start.parameters();
      auto parameters = model_->parameters();
      for (size_t i = 0; i < values.size(); ++i) {
        parameters[i].copy_(values[i]);
      }
    }
    model_->to(device);
    std::unordered_map<const c10::TensorImpl*, size_t> seen;
    const auto items = model_->named_parameters();
    for (size_t i = 0; i < items.size(); ++i) {
      auto parameter = items[i].value();
      if (!seen.emplace(parameter.unsafeGetTensorImpl(), parameters_.size()).second) {
        continue;
      }
      names_.push_back(items[i].key());
      parameters_.push_back(parameter);
      masters_.push_back(parameter.detach().clone());
      frozen_.push_back(!start.named_parameters()[items[i].key()].requires_grad());
      parameter.set_requires_grad(!frozen_.back());
      if (program.precision.param_dtype) {
        parameter.set_data(parameter.to(*program.precision.param_dtype));
      }
      take_gradients_of(parameter, parameters_.size() - 1);
    }
    note_units();
    gradients_.resize(names_.size());
    of_backward_.resize(names_.size());
    buffers_.resize(notes_.size());
    for (auto& of_rank : buffers_) {
      for (const auto& buffer : model_->buffers()) {
        of_rank.push_back(buffer.clone());
      }
    }
    optimize_ = make_optimizer(kind_of_optimizer(), program_.plain_steps, masters_);
  }

  /// As the sharded run's: how a part's function is called decides the order in which gradients are added.
  CallBeside beside = nullptr;

  std::vector<Notes> run() {
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      surroundings = {};
      surroundings.step = static_cast<int>(i);
      surroundings.beside = beside;
      for (const auto& event : program_.steps[i].before) {
        run_event(event);
      }
      train(static_cast<int>(i), program_.steps[i]);
    }
    surroundings = {};
    return notes_;
  }

 private:
  using Tensors = std::vector<at::Tensor>;

  struct TakeGradient final : torch::autograd::PostAccumulateGradHook {
    TakeGradient(Unsharded& owner, size_t index) : owner(owner), index(index) {}
    void operator()(const torch::autograd::Variable& tensor) override {
      auto& sum = owner.of_backward_[index];
      sum = plus(sum, tensor.grad().detach().to(owner.reduce_dtype(index)));
      tensor.mutable_grad() = at::Tensor();
    }
    Unsharded& owner;
    size_t index;
  };

  // Units are listed children first, and a parameter is the first one's.
  void note_units() {
    unit_of_.assign(parameters_.size(), program_.units.size());
    const auto modules = modules_of(*model_);
    for (size_t unit = 0; unit < program_.units.size(); ++unit) {
      for (const int module : program_.units[unit].modules) {
        for (const auto& parameter : modules[static_cast<size_t>(module)]->parameters()) {
          size_t& first = unit_of_[index_of(parameter)];
          first = std::min(first, unit);
        }
      }
    }
  }

  // In the reduce dtype as they come: a recomputed part's may come by themselves.
  void take_gradients_of(const at::Tensor& parameter, size_t index) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<TakeGradient>(*this, index));
  }

  // Raw writes are made to be equal to these.
  Optimizer kind_of_optimizer() const {
    return program_.optimizer == Optimizer::kRaw ? Optimizer::kOperators : program_.optimizer;
  }

  c10::ScalarType reduce_dtype(size_t index) const {
    const auto& precision = program_.precision;
    const auto own = masters_[index].scalar_type();
    if (precision.reduce_dtype) {
      return *precision.reduce_dtype == kShardDtype ? own : *precision.reduce_dtype;
    }
    return precision.param_dtype.value_or(own);
  }

  int ranks() const {
    return program_.arrangement.ranks();
  }

  void be(int rank) {
    surroundings.rank = rank;
    const torch::NoGradGuard no_grad;
    const auto buffers = model_->buffers();
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].copy_(buffers_[static_cast<size_t>(rank)][i]);
    }
  }
  void be_no_more(int rank) {
    const torch::NoGradGuard no_grad;
    const auto buffers = model_->buffers();
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers_[static_cast<size_t>(rank)][i].copy_(buffers[i]);
    }
  }
  void on_each_rank(const std::function<void(int rank)>& body) {
    for (int rank = 0; rank < ranks(); ++rank) {
      be(rank);
      body(rank);
      be_no_more(rank);
    }
  }

  at::Tensor batch(int rank, int number) const {
    return batch_of(program_, rank, number).to(parameters_.front().scalar_type());
  }

  void note(int rank, const std::string& what, const at::Tensor& value) {
    notes_[static_cast<size_t>(rank)].push_back({what, value.defined() ? value.detach().cpu().clone() : value});
  }
  void note_for_all(const std::string& what, const at::Tensor& value) {
    for (int rank = 0; rank < ranks(); ++rank) {
      note(rank, what, value);
    }
  }
  void note_parameters(const std::string& when) {
    for (size_t i = 0; i < names_.size(); ++i) {
      note_for_all(when + ": parameter " + names_[i], masters_[i]);
    }
  }

  void masters_were_written() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < names_.size(); ++i) {
      parameters_[i].copy_(masters_[i]);
    }
  }

  void forget_gradients(bool zeroes) {
    for (auto& gradient : gradients_) {
      if (gradient.defined()) {
        gradient = zeroes ? at::zeros_like(gradient) : at::Tensor();
      }
    }
  }

  // Events

  void run_event(const Event& event) {
    const int choice = event.choice;
    const torch::NoGradGuard no_grad; // for what is not a step
    switch (event.what) {
      case What::kEvaluate: {
        model_->train((choice & 1) != 0);
        on_each_rank([&](int rank) { note(rank, "evaluation", loss_of(*model_, batch(rank, 50 + choice % 7))); });
        model_->train();
        return;
      }
      case What::kBreakForward:
      case What::kBreakBackward:
        return break_a_step(event);
      case What::kDropLoss: {
        const torch::AutoGradMode recording(true);
        on_each_rank([&](int rank) { note(rank, "dropped loss", loss_of(*model_, batch(rank, 60)).detach()); });
        return;
      }
      case What::kClone:
        note_parameters("clone");
        if ((choice & 1) != 0) {
          forget_gradients(false);
          optimize_ = make_optimizer(kind_of_optimizer(), program_.plain_steps, masters_);
        }
        return;
      case What::kSummon:
        note_parameters("summoned");
        if ((choice & 1) != 0) {
          multiply_masters();
        }
        return;
      case What::kWriteShards:
      case What::kWriteShardsRaw:
        return multiply_masters();
      case What::kWriteMember: {
        auto weight = one_of_weights(choice);
        weight.mul_(0.75);
        const size_t index = index_of(weight);
        masters_[index].copy_(weight);
        return;
      }
      case What::kFreeze: {
        auto weight = one_of_weights(choice);
        weight.set_requires_grad(!weight.requires_grad());
        gradients_[index_of(weight)] = at::Tensor(); // what is frozen may keep the last one, or not
        return;
      }
      case What::kToDouble:
        return to_double();
      case What::kReadWhole:
        return note_parameters("read whole");
      case What::kLookAlone:
        return note(choice % ranks(), "looked at alone", one_of_weights(choice / 4));
      case What::kUnshard:
      case What::kFork:
      case What::kReplaceShards:
        return;
    }
  }

  at::Tensor one_of_weights(int choice) const {
    const auto weights = weights_of(*model_);
    return weights[static_cast<size_t>(choice) % weights.size()];
  }
  size_t index_of(const at::Tensor& weight) const {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i].is_same(weight)) {
        return i;
      }
    }
    throw std::logic_error("a weight that is no parameter");
  }

  void multiply_masters() {
    for (auto& master : masters_) {
      master.mul_(0.75);
    }
    masters_were_written();
  }

  void to_double() {
    const auto dtype = program_.precision.param_dtype;
    model_->to(torch::kDouble); // buffers, too
    for (auto& of_rank : buffers_) {
      for (auto& buffer : of_rank) {
        buffer = buffer.is_floating_point() ? buffer.to(torch::kDouble) : buffer;
      }
    }
    for (size_t i = 0; i < names_.size(); ++i) {
      masters_[i] = masters_[i].to(torch::kDouble);
      parameters_[i].set_data(dtype ? parameters_[i].to(*dtype) : parameters_[i].detach());
    }
    masters_were_written();
    forget_gradients(false);
    optimize_ = make_optimizer(kind_of_optimizer(), program_.plain_steps, masters_);
  }

  void break_a_step(const Event& event) {
    on_each_rank([&](int rank) {
      const torch::AutoGradMode recording(true);
      surroundings.parts_until_interrupt = event.choice % 5;
      surroundings.interrupts_forward = event.what == What::kBreakForward;
      bool interrupted = false;
      try {
        loss_of(*model_, batch(rank, 70)).backward();
      } catch (const Interrupted&) {
        interrupted = true;
      }
      surroundings.parts_until_interrupt = -1;
      note(rank, "interrupted", torch::tensor(interrupted ? 1.0 : 0.0));
      forget(of_backward_);
    });
    forget_gradients(false);
  }

  static void forget(Tensors& tensors) {
    for (auto& tensor : tensors) {
      tensor = at::Tensor();
    }
  }

  // Steps

  void train(int step, const StepPlan& plan) {
    // By rank and backward, the gradients of the parameters.
    std::vector<std::vector<Tensors>> gradients(static_cast<size_t>(ranks()));
    std::vector<Micro> micro_of_backward;
    const torch::AutoGradMode recording(true);
    on_each_rank([&](int rank) {
      bool syncs = true;
      MicroBatch micro_batch{
          [&](const at::Tensor& x) { return loss_of(*model_, x); },
          [&](const at::Tensor& loss) { note(rank, "loss of step " + std::to_string(step), loss); },
          [&] { // unsynchronized ones stay, and more is added
            const Tensors nothing(names_.size());
            gradients[static_cast<size_t>(rank)].push_back(syncs ? std::exchange(of_backward_, nothing) : nothing);
          },
          {one_of_weights(step), one_of_weights(step + 1)}};
      for (size_t micro = 0; micro < plan.micros.size(); ++micro) {
        syncs = plan.micros[micro].syncs;
        const size_t before = gradients[static_cast<size_t>(rank)].size();
        micro_batch.run(plan.micros[micro].loss, batch(rank, step * 8 + static_cast<int>(micro)));
        for (size_t i = before; rank == 0 && i < gradients[0].size(); ++i) {
          micro_of_backward.push_back(plan.micros[micro]);
        }
      }
    });
    reduce(gradients, micro_of_backward);
    for (size_t i = 0; i < names_.size(); ++i) {
      note_for_all("gradient of " + names_[i] + " in step " + std::to_string(step), gradients_[i]);
      masters_[i].mutable_grad() = gradients_[i];
    }
    optimize_();
    masters_were_written();
    note_parameters("after step " + std::to_string(step));
    for (auto& master : masters_) {
      master.mutable_grad() = at::Tensor();
    }
    if (!plan.keeps_gradients) {
      forget_gradients(plan.zeroes_gradients);
    }
  }

  // As units do: see `step_gradients` in parity.h. Nothing comes from backwards without synchronization.
  void reduce(const std::vector<std::vector<Tensors>>& gradients, const std::vector<Micro>& micro_of_backward) {
    const auto& arrangement = program_.arrangement;
    std::vector<std::vector<bool>> used; // by backward and unit; there is one gradient for all of a flat unit, or none
    for (const auto& of_rank : gradients) {
      used.resize(micro_of_backward.size(), std::vector<bool>(program_.units.size()));
      for (size_t backward = 0; program_.flat && backward < micro_of_backward.size(); ++backward) {
        for (size_t i = 0; i < names_.size(); ++i) {
          used[backward][unit_of_[i]] = used[backward][unit_of_[i]] || of_rank[backward][i].defined();
        }
      }
    }
    for (size_t i = 0; i < names_.size(); ++i) {
      Tensors whole(static_cast<size_t>(ranks())); // by rank
      Tensors partial(static_cast<size_t>(arrangement.replicas)); // put off
      for (size_t backward = 0; backward < micro_of_backward.size(); ++backward) {
        for (int rank = 0; rank < ranks(); ++rank) {
          whole[static_cast<size_t>(rank)] = gradients[static_cast<size_t>(rank)][backward][i];
        }
        if (used[backward][unit_of_[i]] && parameters_[i].requires_grad() && !whole[0].defined()) {
          whole[0] = at::zeros_like(masters_[i]).to(reduce_dtype(i));
        }
        if (micro_of_backward[backward].syncs) {
          reduce_one(i, whole, partial, micro_of_backward[backward].all_reduces);
        }
      }
    }
  }

  void reduce_one(size_t i, Tensors& whole, Tensors& partial, bool all_reduces) {
    const auto& arrangement = program_.arrangement;
    if (program_.zeros && parameters_[i].requires_grad()) {
      whole[0] = plus(whole[0], at::zeros_like(masters_[i]).to(reduce_dtype(i)));
    }
    at::Tensor total;
    for (int replica = 0; replica < arrangement.replicas; ++replica) {
      at::Tensor sum;
      for (int shard = 0; shard < arrangement.shards; ++shard) {
        sum = plus(sum, std::exchange(whole[static_cast<size_t>(replica * arrangement.shards + shard)], {}));
      }
      auto& put_off = partial[static_cast<size_t>(replica)];
      sum = plus(sum, sum.defined() ? std::exchange(put_off, {}) : at::Tensor());
      if (arrangement.replicas > 1 && !all_reduces) {
        put_off = sum.defined() ? sum : put_off;
      } else {
        total = plus(total, sum);
      }
    }
    if (total.defined()) {
      const auto mean = total / (program_.divisor == 0 ? arrangement.ranks() : program_.divisor);
      gradients_[i] = plus(gradients_[i], mean.to(masters_[i].scalar_type()));
    }
  }

  const Program& program_;
  std::shared_ptr<BlockImpl> model_;
  std::vector<Notes> notes_;
  std::vector<std::string> names_;
  Tensors parameters_; // what the model computes with
  Tensors masters_; // what the optimizer sees
  std::vector<bool> frozen_;
  std::vector<size_t> unit_of_;
  Tensors gradients_; // of the masters
  Tensors of_backward_; // of this rank, since the last backward
  std::vector<Tensors> buffers_; // by rank
  std::function<void()> optimize_;
};

} // namespace fsdp::testing::random
