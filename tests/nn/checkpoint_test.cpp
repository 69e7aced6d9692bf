#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/autocast_mode.h>

#include <fsdp/checkpoint.h>
#include <fsdp/error.h>

namespace fsdp {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

// What a test compares: outputs, then gradients.
using Results = std::vector<Tensor>;

void expect_same_bits(const Results& a, const Results& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    EXPECT_TRUE(!a[i].defined() || torch::equal(a[i], b[i])) << i;
  }
}

struct MlpImpl : torch::nn::Module {
  torch::nn::Linear in{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear out{nullptr};

  MlpImpl()
      : in(register_module("in", torch::nn::Linear(8, 32))),
        dropout(register_module("dropout", torch::nn::Dropout(0.3))),
        out(register_module("out", torch::nn::Linear(32, 8))) {}

  Tensor forward(const Tensor& x) {
    return out(dropout(torch::gelu(in(x))));
  }
};
TORCH_MODULE(Mlp);

Mlp seeded_mlp() {
  torch::manual_seed(5);
  return Mlp();
}

Results gradients_of(torch::nn::Module& module) {
  Results gradients;
  for (const Tensor& parameter : module.parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

// Output, the input's gradient and the parameters' gradients of a model of two equal layers with dropout.
Results train(const std::function<Tensor(Mlp&, const Tensor&)>& layer, bool input_grad = true) {
  Mlp mlp = seeded_mlp();
  Tensor x = torch::randn({4, 8}).requires_grad_(input_grad);
  torch::manual_seed(11);
  Tensor y = layer(mlp, layer(mlp, x).relu());
  const Tensor after = torch::rand({2});
  y.square().sum().backward();
  Results results = gradients_of(*mlp);
  results.insert(results.end(), {y.detach(), after, x.grad(), torch::rand({2})});
  return results;
}

Tensor plain(Mlp& mlp, const Tensor& x) {
  return mlp(x);
}

Tensor checkpointed(Mlp& mlp, const Tensor& x) {
  return checkpoint([mlp](const Tensor& given) mutable { return mlp(given); }, x);
}

Tensor nested(Mlp& mlp, const Tensor& x) {
  return checkpoint(
      [mlp](const Tensor& given) mutable {
        Tensor hidden =
            checkpoint([mlp](const Tensor& t) mutable { return mlp->dropout(torch::gelu(mlp->in(t))); }, given);
        return mlp->out(hidden);
      },
      x);
}

TEST(Checkpoint, GradientsHaveTheSameBitsDropoutIncluded) {
  expect_same_bits(train(checkpointed), train(plain));
}

TEST(Checkpoint, MayBeNested) {
  expect_same_bits(train(nested), train(plain));
}

TEST(Checkpoint, ParametersTrainWithoutAnInputThatRequiresGrad) {
  const Results results = train(checkpointed, /*input_grad=*/false);
  EXPECT_TRUE(results[0].defined());
  expect_same_bits(results, train(plain, /*input_grad=*/false));
}

// Memory of the intermediate results of one function, watched without being kept.
class Watch {
 public:
  void see(const Tensor& tensor) {
    storages_.emplace_back(tensor.storage().getWeakStorageImpl());
  }
  size_t seen() const {
    return storages_.size();
  }
  size_t alive() const {
    return static_cast<size_t>(
        std::count_if(storages_.begin(), storages_.end(), [](const auto& weak) { return !weak.expired(); }));
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

TEST(Checkpoint, IntermediateResultsAreNotKept) {
  for (const bool use : {false, true}) {
    Watch watch;
    Tensor x = torch::randn({16, 16}).requires_grad_();
    const auto function = [&watch](const Tensor& given) {
      Tensor hidden = given;
      for (int i = 0; i < 3; ++i) {
        hidden = torch::sigmoid(hidden * 2);
        watch.see(hidden);
      }
      return hidden * 3;
    };
    Tensor y = use ? checkpoint(function, x) : function(x);
    EXPECT_EQ(watch.alive(), use ? 0u : 3u);
    y.sum().backward();
    EXPECT_EQ(watch.seen(), use ? 6u : 3u);
    EXPECT_EQ(watch.alive(), 0u);
  }
}

TEST(Checkpoint, FirstRunRecordsNoGraph) {
  std::vector<bool> recorded;
  Tensor x = torch::ones({2}).requires_grad_();
  const auto function = [&recorded](const Tensor& given) {
    Tensor hidden = given * 2;
    recorded.push_back(hidden.requires_grad());
    return hidden.exp();
  };
  checkpoint(function, x).sum().backward();
  EXPECT_EQ(recorded, (std::vector<bool>{false, true}));
}

TEST(Checkpoint, BackwardFreesTheInputsAndTheFunction) {
  Watch watch;
  Tensor y;
  {
    Tensor x = torch::randn({16}).requires_grad_();
    Tensor scale = torch::randn({16});
    Tensor input = x * 2;
    watch.see(input);
    watch.see(scale);
    y = checkpoint([scale](const Tensor& given) { return given * scale; }, input);
  }
  EXPECT_EQ(watch.alive(), 2u);
  y.sum().backward();
  EXPECT_EQ(watch.alive(), 0u);
}

TEST(Checkpoint, IntegerAndUndefinedInputsAndOutputs) {
  const auto run = [](bool use) {
    Tensor x = torch::arange(12, torch::kFloat).view({3, 4}).requires_grad_();
    const Tensors inputs{torch::tensor({2, 0}), x, Tensor()};
    const auto function = [](const Tensors& in) -> Tensors {
      EXPECT_FALSE(in[2].defined());
      Tensor rows = in[1].index_select(0, in[0]);
      return {in[0] + 1, (rows * rows), Tensor()};
    };
    Tensors out = use ? checkpoint_list(function, inputs) : function(inputs);
    EXPECT_FALSE(out[2].defined());
    EXPECT_FALSE(out[0].requires_grad());
    out[1].sum().backward();
    return Results{out[0], out[1].detach(), x.grad()};
  };
  expect_same_bits(run(true), run(false));
}

TEST(Checkpoint, ALambdaMayReturnSeveralTensors) {
  Tensor x = torch::ones({3}).requires_grad_();
  const auto out = checkpoint([](const Tensor& in) { return Tensors{in * 2, in * 3}; }, x);
  ASSERT_EQ(out.size(), 2u);
  (out[0] + out[1]).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 5.0)));
}

TEST(Checkpoint, OnlySomeOutputsAreUsed) {
  const auto run = [](bool use) {
    Tensor x = torch::randn({3}, torch::make_generator<at::CPUGeneratorImpl>(3)).requires_grad_();
    const auto function = [](const Tensors& in) -> Tensors { return {in[0].exp(), in[0].sin(), in[0].detach() * 2}; };
    Tensors out = use ? checkpoint_list(function, {x}) : function({x});
    out[1].sum().backward();
    return Results{x.grad(), out[0].detach(), out[2].detach()};
  };
  expect_same_bits(run(true), run(false));
}

TEST(Checkpoint, OutputsThatAreInputsParametersOrViews) {
  const auto run = [](bool use) {
    Tensor x = torch::arange(4, torch::kFloat).requires_grad_();
    Tensor weight = torch::ones({4}).requires_grad_();
    const auto function = [weight](const Tensors& in) -> Tensors { return {in[0], weight, in[0].view({2, 2}), in[0]}; };
    Tensors out = use ? checkpoint_list(function, {x}) : function({x});
    Tensor loss = out[0].square().sum() + (out[1] * 3).sum() + (out[2] * 5).sum() + (out[3] * 7).sum();
    loss.backward();
    return Results{loss.detach(), x.grad(), weight.grad()};
  };
  expect_same_bits(run(true), run(false));
}

TEST(Checkpoint, OutputMayBeChangedInPlace) {
  const auto run = [](bool use) {
    Tensor x = torch::ones({3}).requires_grad_();
    const auto function = [](const Tensor& in) { return in * 2; };
    Tensor y = use ? checkpoint(function, x) : function(x);
    y.mul_(4);
    y.sum().backward();
    return Results{x.grad()};
  };
  expect_same_bits(run(true), run(false));
}

TEST(Checkpoint, TheSameTensorMayBeSeveralInputs) {
  Tensor x = torch::full({2}, 3.0).requires_grad_();
  checkpoint([](const Tensor& a, const Tensor& b) { return a * b; }, x, x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 6.0)));
}

TEST(Checkpoint, WithoutGradModeItIsAPlainCall) {
  torch::NoGradGuard no_grad;
  int runs = 0;
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor y = checkpoint([&runs](const Tensor& in) { return ++runs, in * 2; }, x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST(Checkpoint, ErrorsOfEitherRunReachTheCaller) {
  int runs = 0;
  const auto fails_in_run = [&runs](int which) {
    return [&runs, which](const Tensor& in) {
      if (++runs == which) {
        throw std::runtime_error("broken on purpose");
      }
      return torch::dropout(in, 0.5, /*train=*/true);
    };
  };
  Tensor x = torch::ones({2}).requires_grad_();
  EXPECT_THROW(checkpoint(fails_in_run(1), x), std::runtime_error);
  EXPECT_TRUE(at::GradMode::is_enabled());

  runs = 0;
  Tensor y = checkpoint(fails_in_run(2), x);
  const Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_TRUE(torch::equal(state, at::globalContext().defaultGenerator(at::kCPU).get_state()));
  EXPECT_FALSE(x.grad().defined());
}

TEST(Checkpoint, GraphMayBeRetained) {
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor y = checkpoint([](const Tensor& in) { return in.exp(); }, x).sum();
  y.backward({}, /*retain_graph=*/true);
  const Tensor once = x.grad().clone();
  y.backward();
  EXPECT_TRUE(torch::equal(x.grad(), once * 2));
}

void expect_error(const std::function<void()>& body, const std::string& part) {
  try {
    body();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Checkpoint, SecondBackwardWithoutRetainedGraphIsAnError) {
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor y = checkpoint([](const Tensor& in) { return in.exp(); }, x);
  y.backward(torch::ones({2}));
  expect_error([&] { y.backward(torch::ones({2})); }, "retain_graph");
}

TEST(Checkpoint, GradientsOfChosenTensorsOnlyAreAnError) {
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor y = checkpoint([](const Tensor& in) { return in.exp(); }, x).sum();
  expect_error([&] { torch::autograd::grad({y}, {x}); }, "inputs");
}

TEST(Checkpoint, DifferentiatingTwiceIsAnError) {
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor y = checkpoint([](const Tensor& in) { return in.exp(); }, x).sum();
  expect_error([&] { y.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }, "create_graph");
}

TEST(Checkpoint, AnotherNumberOfOutputsIsAnError) {
  int runs = 0;
  Tensor x = torch::ones({2}).requires_grad_();
  const auto function = [&runs](const Tensors& in) { return ++runs == 1 ? Tensors{in[0] * 2} : Tensors{in[0], in[0]}; };
  Tensors out = checkpoint_list(function, {x});
  expect_error([&] { out[0].sum().backward(); }, "expected the recomputation to return 1");
}

TEST(Checkpoint, AnInputChangedBeforeBackwardIsAnError) {
  Tensor x = torch::ones({2}).requires_grad_();
  Tensor hidden = x * 2;
  Tensor y = checkpoint([](const Tensor& in) { return in.exp(); }, hidden);
  hidden.add_(1);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

TEST(Checkpoint, AFunctionThatChangesItsInputCannotRunAgain) {
  Tensor x = torch::ones({2}).requires_grad_(), counter = torch::zeros({2});
  Tensor y = checkpoint([](const Tensor& in, const Tensor& count) { return in * count.add_(1); }, x, counter);
  EXPECT_THROW(y.sum().backward(), c10::Error);
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

Results train_with_autocast(const std::function<Tensor(Mlp&, const Tensor&)>& layer, bool backward_inside) {
  Mlp mlp = seeded_mlp();
  Tensor x = torch::randn({4, 8}).requires_grad_();
  torch::manual_seed(11);
  Tensor y;
  {
    Autocast autocast;
    y = layer(mlp, layer(mlp, x).relu()) + mlp(x);
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    if (backward_inside) {
      y.square().sum().backward();
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    }
  }
  if (!backward_inside) {
    y.square().sum().backward();
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  Results results = gradients_of(*mlp);
  results.insert(results.end(), {y.detach(), x.grad()});
  return results;
}

// A weight used twice: with the cache, its two gradients are summed before they are cast to float32; recomputed, after.
void expect_close(const Results& a, const Results& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].defined() && b[i].defined()) << i;
    EXPECT_TRUE(torch::allclose(a[i], b[i], /*rtol=*/2e-2, /*atol=*/2e-2)) << i << "\n" << a[i] - b[i];
  }
}

TEST(Checkpoint, RecomputesUnderTheSameAutocast) {
  for (const bool backward_inside : {false, true}) {
    expect_close(train_with_autocast(checkpointed, backward_inside), train_with_autocast(plain, backward_inside));
    expect_close(train_with_autocast(nested, backward_inside), train_with_autocast(plain, backward_inside));
  }
}

// What autocast casts in the first run has no history: code after it must not find that in the cache.
TEST(Checkpoint, LeavesNoCastsInAutocastsCache) {
  Tensor weight = torch::ones({4, 4}).requires_grad_();
  Tensor x = torch::ones({2, 4}).requires_grad_();
  Autocast autocast;
  const Tensor unused = checkpoint([weight](const Tensor& given) { return given.mm(weight); }, x);
  x.mm(weight).sum().backward();
  ASSERT_TRUE(weight.grad().defined());
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({4, 4}, 2.0)));
}

TEST(Checkpoint, ThreadsHaveGraphsOfTheirOwn) {
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&good, i] {
      Tensor x = torch::full({64}, 1.0 + i).requires_grad_();
      for (int step = 0; step < 20; ++step) {
        x.mutable_grad() = Tensor();
        checkpoint([](const Tensor& in) { return in * in; }, x).sum().backward();
      }
      good += torch::equal(x.grad(), x.detach() * 2);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(good, 4);
}

} // namespace
} // namespace fsdp
