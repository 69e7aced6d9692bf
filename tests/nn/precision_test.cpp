// Dtypes of parameters, computation and reduction, and what happens at a module's boundary.

#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

Trial in_precision(const MixedPrecisionPolicy& policy) {
  return {.make = [] { return subjects::tied(); }, .options = {.mp_policy = policy}};
}

// Of two ranks there is one sum only, whatever the precision in which it is worked out.
constexpr int kExactlyAddedRanks[] = {1, 2};

TEST(Precision, AParamDtypeIsThatOfTheReductionToo) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const int ranks : kExactlyAddedRanks) {
      expect_parity(in_precision({.param_dtype = dtype}), ranks);
    }
  }
}

TEST(Precision, AReduceDtypeLeavesTheComputationAlone) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    for (const int ranks : kExactlyAddedRanks) {
      expect_parity(in_precision({.reduce_dtype = dtype}), ranks);
    }
  }
  for (const int ranks : {1, 2, 3, 4}) {
    expect_parity(in_precision({.reduce_dtype = torch::kDouble}), ranks);
  }
}

TEST(Precision, HalfComputesAndFloatReduces) {
  const auto trial = in_precision({.param_dtype = torch::kHalf, .reduce_dtype = torch::kFloat});
  for (const int ranks : {1, 2, 3, 4}) {
    expect_parity(trial, ranks);
  }
  expect_parity_hybrid(trial, {.shards = 2, .replicas = 2});
}

struct SpectralImpl : nn::Module {
  SpectralImpl()
      : mixed(register_parameter("mixed", torch::randn({5, 4}, torch::kComplexFloat))),
        out(register_module("out", nn::Linear(4, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::view_as_real(torch::complex(x, x * x).matmul(mixed)).sum(-1);
    return out(y.to(out->weight.scalar_type())).to(torch::kFloat).pow(2).mean();
  }
  at::Tensor mixed;
  nn::Linear out = nullptr;
};
TORCH_MODULE(Spectral);

// What it meets is not cast either: there is no dtype that it is computed with in.
TEST(Precision, WhatMeetsAComplexParameterStaysAsItIs) {
  on_threads(2, [] {
    Spectral model;
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    const auto y = torch::ones({3, 5}).matmul(torch::real(model->mixed));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    y.sum().backward();
    const auto gradient = sharded(model->parameters(/*recurse=*/false)[0]).full_grad();
    EXPECT_TRUE(torch::real(gradient).equal(torch::full({5, 4}, 3.0)));
    EXPECT_EQ(model->out->forward(torch::ones({3, 4})).scalar_type(), torch::kBFloat16);
  });
}

// Of a complex parameter a policy changes nothing: in a real dtype its gradient would be half of what it is.
TEST(Precision, ComplexParametersStayAsTheyAre) {
  for (const auto& policy : std::vector<MixedPrecisionPolicy>{
           {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
           {.reduce_dtype = torch::kFloat},
           {.reduce_dtype = torch::kDouble},
           {.reduce_dtype = kShardDtype}}) {
    for (const int ranks : {1, 2, 3}) {
      on_threads(ranks, [&] {
        const auto make = [] {
          static std::mutex mutex;
          const std::lock_guard lock(mutex);
          torch::manual_seed(3);
          return Spectral();
        };
        Spectral model = make(), plain = make();
        if (policy.param_dtype) {
          plain->out->to(*policy.param_dtype);
        }
        auto root = fully_shard(*model, {.mp_policy = policy});
        for (const bool last : {false, true}) {
          const auto x = torch::arange(15, torch::kFloat).view({3, 5}) / 8;
          root.set_requires_gradient_sync(last);
          model->forward(x).backward();
          plain->forward(x).backward();
        }
        const auto gradient = sharded(model->parameters(/*recurse=*/false)[0]).full_grad();
        EXPECT_GT(torch::imag(gradient).abs().min().item<float>(), 0);
        EXPECT_TRUE(torch::allclose(gradient, plain->mixed.grad(), 1e-2));
      });
    }
  }
}

/// The gradient after micro-batches whose own are `first`, 1 and 1, of a parameter that is computed with in bfloat16.
double accumulated(c10::ScalarType dtype, double first) {
  nn::Linear model(nn::LinearOptions(1, 1).bias(false));
  model->to(dtype);
  fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = kShardDtype}});
  const auto add = [&](double gradient, bool last) {
    as_fsdp(*model).set_requires_gradient_sync(last);
    call(model, torch::full({1, 1}, gradient)).sum().backward();
  };
  add(first, false);
  add(1, false);
  add(1, true);
  return sharded(model->parameters()[0]).full_grad().item<double>();
}

// In the next smaller dtype, the ones would get lost.
TEST(Precision, TheDtypeOfTheShardsIsThatOfTheReduction) {
  on_threads(2, [] {
    EXPECT_EQ(accumulated(torch::kFloat, 256), 258);
    EXPECT_EQ(accumulated(torch::kDouble, 1 << 25), (1 << 25) + 2);
  });
}

Subject with_scaled_loss() {
  Subject subject = subjects::tied();
  subject.loss = [loss = subject.loss](int rank, int step) { return loss(rank, step) * 8192; };
  return subject;
}

// Two ranks add, then two replicas: one sum each. A part of the division comes first, which costs gradients their last
// bits where half has no smaller numbers; hence the scale.
TEST(Precision, HalfSumsOfHybridMeshesAreThoseOfTheReference) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    Trial trial = in_precision({.reduce_dtype = dtype});
    trial.make = [] { return with_scaled_loss(); };
    expect_parity_hybrid(trial, {.shards = 2, .replicas = 2});
    trial.options.mp_policy = {.param_dtype = dtype};
    expect_parity_hybrid(trial, {.shards = 2, .replicas = 2});
  }
}

/// Two linear layers whose gradients are powers of two times `scale`, on each rank.
at::Tensor hybrid_gradient(const MixedPrecisionPolicy& policy, double scale) {
  nn::Linear model(4, 4);
  fully_shard(*model, {.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}), .mp_policy = policy});
  (model->forward(torch::ones({1, 4})).sum() * scale).backward();
  return sharded(model->parameters()[0]).full_grad();
}

// The largest half is 65504: a sum of four gradients this big would be infinite.
TEST(Precision, HalfSumsOfHybridMeshesDoNotOverflow) {
  on_threads(4, [] {
    const double scale = 32768;
    EXPECT_TRUE(hybrid_gradient({.reduce_dtype = torch::kHalf}, scale).eq(scale).all().item<bool>());
    const auto in_half = hybrid_gradient({.param_dtype = torch::kHalf, .output_dtype = torch::kFloat}, scale);
    EXPECT_TRUE(in_half.eq(scale).all().item<bool>()) << in_half;
  });
}

class Boundaries : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Boundaries, ::testing::Values(1, 2));

TEST_P(Boundaries, InputsAreNotCastWhereThatIsOff) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false}});
    const auto x = torch::ones({2, 4});
    EXPECT_ANY_THROW(model->forward(x)); // as an unsharded bfloat16 layer does
    EXPECT_ANY_THROW(call(model, x));
    as_fsdp(*model).reset_iter_state();
    call(model, x.to(torch::kBFloat16)).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), torch::kFloat);
  });
}

// Operators that refuse mixed dtypes get their inputs in the parameters'; others promote, as they do unsharded.
TEST_P(Boundaries, WithoutOneOperatorsCastWhatTheyWouldRefuse) {
  const auto images = torch::ones({2, 4, 4, 4}), rows = torch::ones({2, 4}), sequence = torch::ones({3, 2, 4});
  const at::Tensor nothing;
  struct Row {
    const char* name;
    std::vector<int64_t> sizes; // of the parameter
    std::function<at::Tensor(const at::Tensor& parameter)> run;
    c10::ScalarType dtype;
  };
  const std::vector<int64_t> kernel{2, 4, 1, 1}, square{4, 4}, vector{4}, batch{2, 4, 4};
  const std::vector<Row> table{
      {"linear", square, [&](const at::Tensor& w) { return at::linear(rows, w); }, torch::kBFloat16},
      {"matmul", square, [&](const at::Tensor& w) { return at::matmul(rows, w); }, torch::kBFloat16},
      {"vdot", vector, [&](const at::Tensor& w) { return at::vdot(rows[0], w); }, torch::kBFloat16},
      {"linalg_multi_dot",
       square,
       [&](const at::Tensor& w) {
         return at::linalg_multi_dot({rows, w, w});
       },
       torch::kBFloat16},
      {"_addmm_activation",
       square,
       [&](const at::Tensor& w) { return at::_addmm_activation(rows[0], rows, w); },
       torch::kBFloat16},
      {"scaled_dot_product_attention",
       batch,
       [&](const at::Tensor& w) {
         return at::scaled_dot_product_attention(at::ones({2, 4, 4}), w, w);
       },
       torch::kBFloat16},
      {"conv2d", kernel, [&](const at::Tensor& w) { return at::conv2d(images, w); }, torch::kBFloat16},
      {"_convolution",
       kernel,
       [&](const at::Tensor& w) {
         return at::_convolution(
             images, w, nothing, {1, 1}, {0, 0}, {1, 1}, false, {0, 0}, 1, false, false, true, true);
       },
       torch::kBFloat16},
      {"layer_norm", vector, [&](const at::Tensor& w) { return at::layer_norm(rows, {4}, w); }, torch::kBFloat16},
      {"lstm_cell",
       std::vector<int64_t>{16, 4},
       [&](const at::Tensor& w) {
         return std::get<0>(at::lstm_cell(rows, {rows, rows}, w, w));
       },
       torch::kBFloat16},
      {"add", vector, [&](const at::Tensor& w) { return rows + w; }, torch::kFloat},
      {"cat",
       vector,
       [&](const at::Tensor& w) {
         return at::cat({rows[0], w});
       },
       torch::kFloat},
  };
  on_threads(GetParam(), [&] {
    for (const Row& row : table) {
      nn::ParameterList model;
      model->append(torch::ones(row.sizes).requires_grad_());
      fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16}});
      const auto out = row.run(model[0]);
      EXPECT_EQ(out.scalar_type(), row.dtype) << row.name;
    }
  });
}

using Pair = std::pair<at::Tensor, std::optional<at::Tensor>>;
using Pieces = std::tuple<at::Tensor, std::vector<at::Tensor>, int>;

/// Takes and gives tensors within all that a boundary looks into, and notes what it was given.
struct ContainersImpl : nn::Module {
  ContainersImpl() : linear(register_module("linear", nn::Linear(4, 4))) {}
  Pieces forward(const std::vector<at::Tensor>& list, const Pair& pair, const std::tuple<at::Tensor, int>& tuple) {
    for (const auto& tensor : {list.at(0), list.at(1), pair.first, pair.second.value(), std::get<0>(tuple)}) {
      seen.push_back(tensor.scalar_type());
    }
    const auto y = linear(list[0]);
    return {y, {y, y.argmax()}, std::get<1>(tuple)};
  }
  nn::Linear linear;
  std::vector<c10::ScalarType> seen;
};
TORCH_MODULE(Containers);

TEST_P(Boundaries, LookIntoContainers) {
  on_threads(GetParam(), [] {
    Containers model;
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kDouble}});
    const auto x = torch::ones({2, 4});
    const auto [whole, list, number] = call(
        model, std::vector<at::Tensor>{x, x.to(torch::kLong)}, Pair{x, x}, std::tuple<at::Tensor, int>{x.eq(1), 7});
    EXPECT_EQ(
        model->seen, (std::vector{torch::kBFloat16, torch::kLong, torch::kBFloat16, torch::kBFloat16, torch::kBool}));
    EXPECT_EQ(whole.scalar_type(), torch::kDouble);
    EXPECT_EQ(list.at(0).scalar_type(), torch::kDouble);
    EXPECT_EQ(list.at(1).scalar_type(), torch::kLong);
    EXPECT_EQ(number, 7);
  });
}

/// bfloat16 where that is fast, on the CPU, for a scope.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

TEST_P(Boundaries, AutocastGivesTheGradientsOfUnshardedTraining) {
  const MakeSubject make = [] {
    Subject subject = subjects::tied();
    subject.loss = [plain = subject.loss](int rank, int step) {
      const Autocast scope;
      return plain(rank, step);
    };
    return subject;
  };
  expect_parity({.make = make}, GetParam());
}

/// How many bytes were allocated on this thread while it lives, less those that were freed.
class LiveBytes {
 public:
  LiveBytes() : counter_(std::make_shared<Counter>()), scope_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}
  int64_t count() const {
    return counter_->bytes;
  }

 private:
  struct Counter final : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      bytes += size;
    }
    bool memoryProfilingEnabled() const override {
      return true;
    }
    std::atomic<int64_t> bytes = 0;
  };
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard scope_;
};

constexpr int64_t kWidth = 256, kLayers = 4, kBytesOfCopy = kWidth * kWidth * 2;

/// Multiplies by the weight itself: copies of views, which nn::Linear makes of it, are never kept.
struct ProductImpl : nn::Module {
  ProductImpl() : weight(register_parameter("weight", torch::ones({kWidth, kWidth}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::mm(x, weight);
  }
  at::Tensor weight;
};
TORCH_MODULE(Product);

nn::Sequential wide_layers() {
  nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back(Product());
  }
  return model;
}

/// What a forward has allocated and not freed when its graph is gone and autocast is about to end.
int64_t kept_by_autocast(nn::Sequential& model) {
  const auto x = torch::ones({1, kWidth});
  const LiveBytes live;
  const Autocast scope;
  model->forward(x);
  return live.count();
}

TEST_P(Boundaries, AutocastKeepsNoCopyOfAUnit) {
  auto plain = wide_layers();
  EXPECT_GE(kept_by_autocast(plain), kLayers * kBytesOfCopy) << "nothing is measured";
  on_threads(GetParam(), [] {
    auto model = wide_layers();
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    fully_shard(*model);
    kept_by_autocast(model); // and what is allocated once
    EXPECT_LT(kept_by_autocast(model), kBytesOfCopy / 2);
  });
}

} // namespace
} // namespace fsdp::testing
