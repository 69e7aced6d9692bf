#include <algorithm>
#include <cmath>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/error.h>
#include <fsdp/optim.h>

namespace fsdp::optim {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

AdamWOptions test_options() {
  return AdamWOptions(3e-3).betas({0.9, 0.95}).weight_decay(0.1);
}

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const Tensor& param) {
  return static_cast<AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

Tensor noise(at::IntArrayRef sizes, uint64_t seed, torch::Dtype dtype = torch::kFloat) {
  return torch::randn(sizes, torch::make_generator<at::CPUGeneratorImpl>(seed)).to(dtype);
}

void step_with(torch::optim::Optimizer& optimizer, const std::vector<Tensor>& params, uint64_t seed) {
  for (size_t i = 0; i < params.size(); ++i) {
    Tensor grad = torch::empty_like(params[i]);
    params[i].mutable_grad() = grad.copy_(noise(params[i].sizes(), seed * 100 + i, params[i].scalar_type()));
  }
  optimizer.step();
}

Tensor leaf(const Tensor& values) {
  return values.clone().requires_grad_();
}

// How far `a` is from `b` at most, in units of the last place of b's dtype at the size of b (and of `least` where b is
// smaller).
double ulps(const Tensor& a, const Tensor& b, double least) {
  const double epsilon = b.scalar_type() == torch::kDouble  ? 0x1p-52
                         : b.scalar_type() == torch::kFloat ? 0x1p-23
                                                            : 0x1p-7;
  const Tensor exact = b.detach().to(torch::kDouble);
  const Tensor scale = exact.abs().clamp_min(least) * epsilon;
  return ((a.detach().to(torch::kDouble) - exact).abs() / scale).max().item<double>();
}

struct Kind {
  torch::Dtype dtype;
  bool amsgrad;
  double param_ulps; ///< allowed after 20 steps
  double state_ulps;
};

class AdamWAgainstTorch : public ::testing::TestWithParam<Kind> {};

// Float types: the averages are computed by the same roundings; the parameter differs where LibTorch's vectorized
// square root is not correctly rounded, by little against the way it went (20 steps of lr). Half types: LibTorch rounds
// after each of its operators, this kernel once.
TEST_P(AdamWAgainstTorch, NumbersAreThoseOfTorchAdamW) {
  const Kind kind = GetParam();
  const auto options = test_options().amsgrad(kind.amsgrad);
  std::vector<Tensor> ours;
  std::vector<Tensor> theirs;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{1000003}, {37, 13}, {}, {0}, {5}}) {
    ours.push_back(leaf(noise(sizes, 7, kind.dtype)));
    theirs.push_back(leaf(ours.back().detach()));
  }
  AdamW mine(ours, options);
  torch::optim::AdamW reference(theirs, options);
  for (uint64_t step = 1; step <= 20; ++step) {
    step_with(mine, ours, step);
    step_with(reference, theirs, step);
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    const auto& a = state_of(mine, ours[i]);
    const auto& b = state_of(reference, theirs[i]);
    EXPECT_EQ(a.step(), 20);
    EXPECT_EQ(a.max_exp_avg_sq().defined(), kind.amsgrad);
    if (ours[i].numel() == 0) {
      continue;
    }
    EXPECT_LE(ulps(ours[i], theirs[i], /*least=*/20 * 3e-3), kind.param_ulps) << i;
    EXPECT_LE(ulps(a.exp_avg(), b.exp_avg(), 1e-1), kind.state_ulps) << i;
    EXPECT_LE(ulps(a.exp_avg_sq(), b.exp_avg_sq(), 1e-1), kind.state_ulps) << i;
    if (kind.amsgrad) {
      EXPECT_LE(ulps(a.max_exp_avg_sq(), b.max_exp_avg_sq(), 1e-1), kind.state_ulps) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Dtypes,
    AdamWAgainstTorch,
    ::testing::Values(
        Kind{torch::kFloat, false, 4, 1},
        Kind{torch::kFloat, true, 4, 1},
        Kind{torch::kDouble, false, 4, 1},
        Kind{torch::kDouble, true, 4, 1},
        Kind{torch::kBFloat16, false, 16, 32},
        Kind{torch::kBFloat16, true, 16, 32}));

struct Whole {
  Tensor param;
  AdamWParamState state;
};

// `count` elements from `start` on of a parameter of 4099, after three steps.
Whole trained(torch::Dtype dtype, bool amsgrad, int64_t start, int64_t count) {
  const auto cut = [&](const Tensor& whole) { return whole.narrow(0, start, count); };
  Tensor storage = noise({4099}, 1, dtype);
  Tensor param = cut(storage).detach().requires_grad_();
  AdamW optimizer({param}, test_options().amsgrad(amsgrad));
  for (uint64_t step = 1; step <= 3; ++step) {
    param.mutable_grad() = cut(noise({4099}, step + 10, dtype)).clone();
    optimizer.step();
  }
  return {param.detach(), state_of(optimizer, param)};
}

// `fsdp` cuts parameters anywhere: neither the length nor the alignment of a slice may change a bit.
TEST(AdamW, SlicesHaveTheBitsOfTheWhole) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    for (const bool amsgrad : {false, true}) {
      const Whole whole = trained(dtype, amsgrad, 0, 4099);
      for (const int64_t start : {0, 1, 3, 5, 8, 17, 1024}) {
        for (const int64_t count : {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000}) {
          const Whole slice = trained(dtype, amsgrad, start, count);
          const auto same = [&](const Tensor& part, const Tensor& all) {
            return torch::equal(part, all.narrow(0, start, count));
          };
          ASSERT_TRUE(same(slice.param, whole.param)) << dtype << " " << start << " " << count;
          ASSERT_TRUE(same(slice.state.exp_avg(), whole.state.exp_avg())) << dtype << " " << start << " " << count;
          ASSERT_TRUE(same(slice.state.exp_avg_sq(), whole.state.exp_avg_sq()))
              << dtype << " " << start << " " << count;
          ASSERT_TRUE(!amsgrad || same(slice.state.max_exp_avg_sq(), whole.state.max_exp_avg_sq()));
        }
      }
    }
  }
}

TEST(AdamW, ThreadsDoNotChangeBits) {
  const int threads = at::get_num_threads();
  std::vector<Tensor> results;
  for (const int count : {1, 3}) {
    at::set_num_threads(count);
    Tensor param = leaf(noise({300007}, 1));
    AdamW optimizer({param}, test_options());
    step_with(optimizer, {param}, 2);
    results.push_back(param.detach());
  }
  at::set_num_threads(threads);
  EXPECT_TRUE(torch::equal(results[0], results[1]));
}

// The parameter is transposed, its gradient is not, or the parameter has gaps.
TEST(AdamW, LayoutsMayDiffer) {
  const Tensor values = noise({40, 30}, 1);
  const Tensor grad = noise({40, 30}, 2);
  Tensor contiguous = leaf(values);
  contiguous.mutable_grad() = grad.clone();
  Tensor transposed = values.t().contiguous().t().detach().requires_grad_();
  transposed.mutable_grad() = grad.clone();
  Tensor wide = torch::zeros({40, 64});
  Tensor gaps = wide.narrow(1, 2, 30).copy_(values).detach().requires_grad_();
  gaps.mutable_grad() = grad.t().contiguous().t();
  ASSERT_FALSE(transposed.is_contiguous() || gaps.is_contiguous());
  AdamW optimizer({contiguous, transposed, gaps}, test_options());
  optimizer.step();
  optimizer.step();
  EXPECT_TRUE(torch::equal(transposed, contiguous));
  EXPECT_TRUE(torch::equal(gaps, contiguous));
  EXPECT_EQ(wide.narrow(1, 32, 32).abs().sum().item<float>(), 0);
}

TEST(AdamW, SkipsParametersWithoutGradient) {
  Tensor used = leaf(torch::ones({3}));
  Tensor unused = leaf(torch::ones({3}));
  AdamW optimizer({used, unused}, test_options());
  step_with(optimizer, {used}, 1);
  EXPECT_TRUE(torch::equal(unused, torch::ones({3})));
  EXPECT_FALSE(torch::equal(used, torch::ones({3})));
  EXPECT_EQ(optimizer.state().size(), 1u);
  // A parameter whose gradients begin later has a step count of its own.
  step_with(optimizer, {used, unused}, 2);
  EXPECT_EQ(state_of(optimizer, used).step(), 2);
  EXPECT_EQ(state_of(optimizer, unused).step(), 1);
}

TEST(AdamW, StepsOfOneGroupMayDiffer) {
  Tensor first = leaf(torch::ones({9}));
  Tensor second = leaf(torch::ones({9}));
  Tensor alone = leaf(torch::ones({9}));
  AdamW together({first, second}, test_options());
  AdamW separate({alone}, test_options());
  first.mutable_grad() = torch::ones({9});
  together.step();
  second.mutable_grad() = torch::full({9}, 0.5);
  alone.mutable_grad() = torch::full({9}, 0.5);
  together.step();
  separate.step();
  EXPECT_TRUE(torch::equal(second, alone));
}

TEST(AdamW, GroupsHaveTheirOwnOptionsAndDtypes) {
  const auto groups = [](const std::vector<Tensor>& p) {
    std::vector<OptimizerParamGroup> result;
    result.emplace_back(std::vector<Tensor>{p[0], p[1]}, std::make_unique<AdamWOptions>(test_options().lr(1e-1)));
    result.emplace_back(std::vector<Tensor>{p[2]}, std::make_unique<AdamWOptions>(test_options().weight_decay(0.5)));
    return result;
  };
  std::vector<Tensor> ours;
  std::vector<Tensor> theirs;
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kFloat}) {
    ours.push_back(leaf(noise({20}, 3, dtype)));
    theirs.push_back(leaf(ours.back().detach()));
  }
  AdamW mine(groups(ours), test_options());
  torch::optim::AdamW reference(groups(theirs), test_options());
  for (uint64_t step = 1; step <= 3; ++step) {
    step_with(mine, ours, step);
    step_with(reference, theirs, step);
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LE(ulps(ours[i], theirs[i], /*least=*/3 * 1e-1), 4) << i;
  }
  EXPECT_FALSE(torch::equal(ours[0], ours[2]));
}

TEST(AdamW, AWeightListedTwiceIsUpdatedOnce) {
  Tensor shared = leaf(torch::ones({4}));
  Tensor single = leaf(torch::ones({4}));
  AdamW twice({shared, shared}, test_options());
  AdamW once({single}, test_options());
  shared.mutable_grad() = torch::ones({4});
  single.mutable_grad() = torch::ones({4});
  twice.step();
  once.step();
  EXPECT_TRUE(torch::equal(shared, single));
}

TEST(AdamW, NotANumberIsNotHidden) {
  Tensor param = leaf(torch::ones({20}));
  param.mutable_grad() = torch::zeros({20});
  param.grad()[3] = std::nan("");
  AdamW optimizer({param}, test_options().amsgrad(true));
  optimizer.step();
  EXPECT_EQ(torch::isnan(param).sum().item<int64_t>(), 1);
  param.grad().zero_();
  optimizer.step();
  EXPECT_TRUE(torch::isnan(state_of(optimizer, param).max_exp_avg_sq()[3]).item<bool>());
}

TEST(AdamW, ClosureRunsWithGradModeOn) {
  Tensor param = leaf(torch::ones({2}));
  AdamW optimizer({param}, test_options());
  const Tensor loss = optimizer.step([&] {
    Tensor value = (param * 3).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<float>(), 6);
  EXPECT_FALSE(torch::equal(param, torch::ones({2})));
}

TEST(AdamW, StepIsSeenByWhatWasSavedForBackward) {
  Tensor param = leaf(torch::ones({2}));
  Tensor loss = (param * param).sum();
  AdamW optimizer({param}, test_options());
  param.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

// Trains with `First`, saves, loads into a `Second`, trains both on: they must go the same way.
template <typename First, typename Second>
void expect_exchange(bool amsgrad) {
  std::vector<Tensor> a{leaf(noise({33}, 1)), leaf(noise({2, 5}, 2)), leaf(torch::empty({0})), leaf(torch::ones({3}))};
  First first(a, test_options().amsgrad(amsgrad));
  const std::vector<Tensor> trained(a.begin(), a.end() - 1);
  step_with(first, trained, 1);
  step_with(first, trained, 2);
  std::stringstream file;
  torch::save(first, file);

  std::vector<Tensor> b;
  for (const Tensor& param : a) {
    b.push_back(leaf(param.detach()));
  }
  Second second(b, AdamWOptions(0.5));
  torch::load(second, file);
  EXPECT_EQ(second.state().size(), 3u);
  EXPECT_EQ(state_of(second, b[0]).step(), 2);
  EXPECT_EQ(static_cast<AdamWOptions&>(second.param_groups()[0].options()).lr(), test_options().lr());
  EXPECT_TRUE(torch::equal(state_of(second, b[0]).exp_avg_sq(), state_of(first, a[0]).exp_avg_sq()));
  step_with(first, a, 3);
  step_with(second, b, 3);
  for (const size_t i : {0, 1, 3}) {
    EXPECT_LE(ulps(b[i], a[i], 1e-2), 2) << i;
  }
}

TEST(AdamW, TorchAdamWLoadsWhatItSaved) {
  expect_exchange<AdamW, torch::optim::AdamW>(false);
  expect_exchange<AdamW, torch::optim::AdamW>(true);
}

TEST(AdamW, LoadsWhatTorchAdamWSaved) {
  expect_exchange<torch::optim::AdamW, AdamW>(false);
  expect_exchange<torch::optim::AdamW, AdamW>(true);
}

TEST(AdamW, LoadsWhatItSaved) {
  expect_exchange<AdamW, AdamW>(false);
}

TEST(AdamW, AmsgradMayBeTurnedOnLater) {
  Tensor param = leaf(torch::ones({3}));
  AdamW optimizer({param}, test_options());
  step_with(optimizer, {param}, 1);
  static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  step_with(optimizer, {param}, 2);
  EXPECT_TRUE(state_of(optimizer, param).max_exp_avg_sq().defined());
}

void expect_error(const std::function<void()>& body, const std::string& part) {
  try {
    body();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(AdamW, OptionsOutOfRangeAreErrors) {
  const Tensor param = leaf(torch::ones({3}));
  expect_error([&] { AdamW({param}, AdamWOptions(-1)); }, "learning rate");
  expect_error([&] { AdamW({param}, AdamWOptions(std::nan(""))); }, "learning rate");
  expect_error([&] { AdamW({param}, AdamWOptions(1).eps(-1)); }, "eps");
  expect_error([&] { AdamW({param}, AdamWOptions(1).weight_decay(-1)); }, "weight decay");
  expect_error([&] { AdamW({param}, AdamWOptions(1).betas({1.0, 0.9})); }, "beta1");
  expect_error([&] { AdamW({param}, AdamWOptions(1).betas({0.9, -0.1})); }, "beta2");
}

TEST(AdamW, SparseGradientIsAnError) {
  Tensor param = leaf(torch::ones({4, 2}));
  torch::embedding(param, torch::tensor({1}), -1, false, /*sparse=*/true).sum().backward();
  AdamW optimizer({param}, test_options());
  expect_error([&] { optimizer.step(); }, "dense gradients");
}

TEST(AdamW, FailedStepChangesNothing) {
  Tensor good = leaf(torch::ones({4}));
  Tensor bad = leaf(torch::ones({4}));
  AdamW optimizer({good, bad}, test_options());
  step_with(optimizer, {good, bad}, 1);
  const Tensor before = good.detach().clone();
  // Assigning a gradient of another dtype is refused; data that was changed under the gradient is how one comes about.
  bad.mutable_grad().set_data(torch::ones({4}, torch::kDouble));
  expect_error([&] { optimizer.step(); }, "got Double");
  EXPECT_TRUE(torch::equal(good, before));
  EXPECT_EQ(state_of(optimizer, good).step(), 1);
}

TEST(AdamW, StateOfAnotherShapeIsAnError) {
  Tensor param = leaf(torch::ones({4}));
  AdamW optimizer({param}, test_options());
  step_with(optimizer, {param}, 1);
  state_of(optimizer, param).exp_avg(torch::zeros({3}));
  expect_error([&] { optimizer.step(); }, "got Float [3]");
}

} // namespace
} // namespace fsdp::optim
