// Modules that are recorded have the values of an ordinary construction, in every bit.

#include <atomic>
#include <limits>
#include <thread>

#include <ATen/autocast_mode.h>

#include "comm/recording_backend.h"
#include "nn/same_construction.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

TEST(DeferredInit, GivesLayersTheValuesOfAnOrdinaryConstruction) {
  expect_same_construction([] {
    nn::Sequential layers;
    layers->push_back(nn::Linear(20, 30));
    layers->push_back(nn::Linear(nn::LinearOptions(3, 2).bias(false)));
    layers->push_back(nn::Bilinear(nn::BilinearOptions(3, 2, 4)));
    layers->push_back(nn::Embedding(nn::EmbeddingOptions(9, 4).padding_idx(2)));
    layers->push_back(nn::EmbeddingBag(9, 4));
    layers->push_back(nn::Conv2d(nn::Conv2dOptions(4, 6, 3).groups(2)));
    layers->push_back(nn::ConvTranspose1d(nn::ConvTranspose1dOptions(3, 2, 2)));
    layers->push_back(nn::LayerNorm(nn::LayerNormOptions({5})));
    layers->push_back(nn::GroupNorm(nn::GroupNormOptions(2, 4)));
    layers->push_back(nn::BatchNorm2d(4));
    layers->push_back(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(3).affine(true).track_running_stats(true)));
    layers->push_back(nn::PReLU());
    layers->push_back(nn::LSTM(nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true)));
    layers->push_back(nn::GRU(4, 5));
    layers->push_back(nn::LSTMCell(3, 2));
    layers->push_back(nn::MultiheadAttention(8, 2));
    layers->push_back(nn::Transformer(nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(12)));
    layers->push_back(nn::CrossEntropyLoss(nn::CrossEntropyLossOptions().weight(torch::ones({3}))));
    return layers;
  });
}

TEST(DeferredInit, KnowsParametersOfEveryKind) {
  expect_same_construction([] { return std::make_shared<subjects::OddImpl>(); });
  expect_same_construction([] { return subjects::Tied(2); });
  expect_same_construction([] { return std::make_shared<subjects::RecurrentImpl>(); });
}

struct InitializedImpl : nn::Module {
  InitializedImpl() {
    at::Tensor w[16];
    for (int i = 0; i < 16; ++i) {
      w[i] = register_parameter("w" + std::to_string(i), torch::empty({6, 4}));
    }
    nn::init::constant_(w[0], 0.25);
    nn::init::eye_(w[1]);
    nn::init::dirac_(register_parameter("kernel", torch::empty({4, 4, 3})));
    nn::init::kaiming_normal_(w[2]);
    nn::init::kaiming_uniform_(w[3], std::sqrt(5));
    nn::init::normal_(w[4], 1, 0.02);
    nn::init::ones_(w[5]);
    nn::init::orthogonal_(w[6], 1.5);
    nn::init::sparse_(w[7], 0.3);
    nn::init::uniform_(w[8], -2, 2);
    nn::init::xavier_normal_(w[9]);
    nn::init::xavier_uniform_(w[10], 0.5);
    nn::init::zeros_(w[11]);
    const torch::NoGradGuard no_grad;
    w[12].uniform_(-0.9, 0.9).erfinv_().mul_(std::sqrt(2.) * 0.02).clamp_(-0.03, 0.03); // a truncated normal
    w[13].copy_(torch::randn({4, 6}).t());
    for (int i = 0; i < 6; ++i) {
      w[14][i].fill_(i);
      w[14].slice(0, i).select(1, 1).mul_(2);
      w[15].narrow(0, i, 1).normal_();
    }
  }
};
TORCH_MODULE(Initialized);

TEST(DeferredInit, FollowsInitializers) {
  expect_same_construction([] { return Initialized(); });
}

TEST(DeferredInit, FollowsOperatorsThatHaveNoKernelForTheMetaDevice) {
  expect_same_construction([] {
    auto module = std::make_shared<nn::Module>();
    auto rates = module->register_buffer("rates", torch::rand({3, 4}).mul_(5));
    module->register_buffer("counts", torch::poisson(rates));
    module->register_buffer("kept", rates.masked_select(rates > 1));
    module->register_buffer("places", (rates > 1).nonzero());
    module->register_buffer("different", std::get<0>(at::_unique2(rates.round())));
    module->register_buffer("chosen", torch::multinomial(rates, 2));
    module->register_buffer("histogram", torch::histc(rates, 5));
    auto matrix = torch::randn({4, 4});
    module->register_buffer("q", std::get<0>(torch::linalg_qr(matrix)));
    module->register_buffer("values", torch::linalg_svdvals(matrix).abs_());
    module->register_buffer("last", torch::rand({2}));
    return module;
  });
}

TEST(DeferredInit, FollowsRandomNumbersOfEveryKind) {
  expect_same_construction([] {
    auto module = std::make_shared<nn::Module>();
    auto own = at::detail::createCPUGenerator(11);
    const auto keep = [&](const at::Tensor& tensor) {
      module->register_buffer("buffer" + std::to_string(module->buffers().size()), tensor);
    };
    keep(torch::rand({5}));
    keep(torch::randn({33}));
    keep(torch::randint(9, {5}));
    keep(torch::randperm(9));
    keep(torch::empty({5}).exponential_());
    keep(torch::empty({5}).log_normal_());
    keep(torch::empty({5}).cauchy_());
    keep(torch::empty({5}).geometric_(0.3));
    keep(torch::empty({5}).random_(3, 9));
    keep(torch::empty({5}).bernoulli_(0.5));
    keep(torch::empty({5}).bernoulli_(torch::full({5}, 0.5)));
    keep(torch::bernoulli(torch::full({5}, 0.5)));
    keep(at::normal(torch::zeros({5}), torch::ones({5})));
    keep(torch::dropout(torch::ones({20}), 0.5, /*train=*/true));
    keep(torch::dropout(torch::ones({20}), 0.5, /*train=*/false));
    keep(torch::rand_like(torch::ones({3})));
    keep(torch::randn_like(torch::ones({3, 17})));
    keep(torch::empty({40}).normal_(0, 1, own));
    keep(at::rand({3}, own));
    keep(torch::empty({3}).uniform_(0, 1, own));
    keep(torch::randn({1})); // of a pair, of which the generator keeps the other
    keep(torch::randn({3}, torch::kDouble));
    return module;
  });
}

TEST(DeferredInit, KnowsWhatIsCopiedFromAnother) {
  const auto build = [] {
    auto module = std::make_shared<nn::Module>();
    nn::Linear a(4, 4), b(4, 4), c(4, 4), d(4, 4);
    const torch::NoGradGuard no_grad;
    b->weight.copy_(a->weight);
    a->weight.mul_(2); // too late for b
    c->weight.set_data(a->weight * b->weight);
    a->weight.copy_(c->weight);
    std::swap(b->weight, d->weight);
    d->bias.set_data(b->bias); // one memory
    d->bias.add_(1);
    module->register_module("a", a);
    module->register_module("b", b);
    module->register_module("c", c);
    module->register_module("d", d);
    return module;
  };
  expect_same_construction(build);
  expect_same_construction(build, Order::kBackward);
}

TEST(DeferredInit, KeepsTies) {
  const auto module = deferred_init([] {
    auto module = std::make_shared<nn::Module>();
    nn::Embedding embedding(5, 3);
    nn::Linear head(nn::LinearOptions(3, 5).bias(false)), other(nn::LinearOptions(3, 5).bias(false));
    head->weight = embedding->weight; // one tensor
    other->weight.set_data(embedding->weight); // two of one memory
    module->register_module("embedding", embedding);
    module->register_parameter("head", head->weight);
    module->register_parameter("other", other->weight);
    return module;
  });
  materialize(*module);
  const auto parameters = module->named_parameters();
  const auto& head = parameters["head"];
  EXPECT_TRUE(head.is_same(parameters["embedding.weight"]));
  EXPECT_FALSE(head.is_same(parameters["other"]));
  EXPECT_EQ(head.data_ptr(), parameters["other"].data_ptr());
}

TEST(DeferredInit, GivesWhatTheConstructionReads) {
  expect_same_construction([] {
    nn::Linear layer(4, 3);
    const torch::NoGradGuard no_grad;
    if (layer->weight.norm().item<float>() > 0) {
      layer->weight.div_(layer->weight.norm().item<double>());
    }
    layer->bias.fill_(layer->weight.equal(layer->weight.clone()) ? 3 : 4);
    layer->bias.add_(torch::allclose(layer->bias, torch::full({3}, 3.)) ? 1 : 2);
    layer->weight.select(0, layer->weight.sum(1).argmax().item<int64_t>()).zero_();
    for (int i = 0; i < 3; ++i) {
      layer->bias[i] = layer->bias[i].item<float>() + i;
    }
    return layer;
  });
}

TEST(DeferredInit, TakesTensorsFromOutside) {
  const auto outside = torch::arange(12, torch::kFloat).view({3, 4});
  expect_same_construction([outside] {
    auto module = std::make_shared<nn::Module>();
    auto weight = module->register_parameter("weight", torch::empty({3, 4}));
    const torch::NoGradGuard no_grad;
    weight.copy_(outside);
    std::vector<float> numbers{1, 2, 3};
    module->register_buffer("listed", torch::tensor(numbers));
    module->register_buffer("nested", torch::tensor({{1, 2}, {3, 4}}));
    module->register_buffer("scalar", torch::tensor(2.5) * outside.sum());
    module->register_buffer("scaled", torch::tensor(numbers).mul_(2));
    module->register_buffer("blob", torch::from_blob(numbers.data(), {3}).clone());
    auto filled = module->register_parameter("filled", torch::empty({3}));
    filled.copy_(torch::from_blob(numbers.data(), {3}));
    numbers.assign({7, 8, 9}); // of which nothing is to be seen
    return module;
  });
}

TEST(DeferredInit, RunsWritesToTensorsFromOutside) {
  const auto outside = torch::zeros({3});
  const auto layer = deferred_init([&] {
    nn::Linear layer(3, 3);
    const torch::NoGradGuard no_grad;
    layer->bias.fill_(2);
    outside.add_(1);
    outside.add_(layer->bias);
    return layer;
  });
  EXPECT_TRUE(outside.equal(torch::full({3}, 3.)));
  EXPECT_TRUE(is_deferred(layer->bias));
}

TEST(DeferredInit, RefusesValuesFromOutsideThatWereWrittenSince) {
  const auto outside = torch::zeros({3});
  const auto layer = deferred_init([&] {
    nn::Linear layer(3, 3);
    const torch::NoGradGuard no_grad;
    layer->bias.copy_(outside);
    return layer;
  });
  outside.add_(1);
  EXPECT_TRUE(contains(error_message([&] { materialize(layer); }), "has been written since"));
}

TEST(DeferredInit, AsksNothingOfTensorsThatOnlyLendTheirSizes) {
  const auto outside = torch::zeros({3});
  const auto module = deferred_init([&] {
    auto module = std::make_shared<nn::Module>();
    const auto copied = torch::empty({3}).copy_(outside);
    module->register_buffer("zeros", torch::zeros_like(copied));
    module->register_buffer("full", copied.new_full({2}, 5));
    return module;
  });
  outside.add_(1); // which nobody has read
  materialize(module);
  EXPECT_TRUE(module->named_buffers()["zeros"].equal(torch::zeros({3})));
  EXPECT_TRUE(module->named_buffers()["full"].equal(torch::full({2}, 5.)));
}

// Operators that copy where they must, and need not here.
TEST(DeferredInit, FollowsWritesThroughWhatMayBeAView) {
  expect_same_construction([] {
    auto module = std::make_shared<nn::Module>();
    auto weight = module->register_parameter("weight", torch::zeros({2, 3}), /*requires_grad=*/false);
    weight.reshape({6}).fill_(2);
    weight.contiguous().narrow(0, 0, 1).fill_(3);
    weight.to(torch::kFloat).select(1, 1).add_(1);
    weight.flatten().narrow(0, 5, 1).mul_(4);
    weight.t().reshape({6}).fill_(9); // a copy
    return module;
  });
}

TEST(DeferredInit, RefusesToCommunicateValuesThatAreNotThereYet) {
  const auto backend = c10::make_intrusive<RecordingBackend>(0, 2);
  const auto group = process_group_of(backend);
  const auto message = error_message([&] {
    deferred_init([&] {
      nn::Linear layer(3, 3);
      std::vector<at::Tensor> tensors{layer->bias.detach()};
      group->allreduce(tensors);
      return layer;
    });
  });
  EXPECT_TRUE(contains(message, "communicates values, but its tensor is recorded")) << message;
  EXPECT_TRUE(contains(message, "do that after fully_shard")) << message;
  EXPECT_TRUE(backend->calls.empty());
}

TEST(DeferredInit, FollowsConversions) {
  expect_same_construction([] {
    nn::ModuleList layers(nn::Linear(4, 3), nn::BatchNorm1d(3));
    layers->to(torch::kBFloat16);
    layers[0]->to(torch::kDouble);
    layers->push_back(layers[0]->clone());
    layers->push_back(nn::Linear(3, 3));
    return layers;
  });
}

TEST(DeferredInit, KnowsTheDefaultDtypeOfTheTime) {
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  const auto make = [] {
    nn::Linear layer(3, 2);
    layer->register_buffer("drawn", torch::rand({4})); // of a double's digits
    layer->register_buffer("divided", torch::arange(8) / 3);
    layer->register_buffer("scaled", torch::arange(8) * 0.1);
    auto given = torch::empty({8});
    torch::div_out(given, torch::arange(8), torch::full({8}, 3, torch::kLong));
    layer->register_buffer("given", given);
    return layer;
  };
  torch::manual_seed(1);
  const nn::Linear ordinary = make();
  torch::manual_seed(1);
  const auto layer = deferred_init(make);
  torch::set_default_dtype(before);
  materialize(layer);
  EXPECT_EQ(layer->weight.scalar_type(), torch::kDouble);
  EXPECT_TRUE(layer->weight.equal(ordinary->weight));
  for (const auto& buffer : ordinary->named_buffers()) {
    EXPECT_TRUE(layer->named_buffers()[buffer.key()].equal(buffer.value())) << buffer.key();
  }
  EXPECT_EQ(torch::get_default_dtype(), before);
}

// They would give other values, without a word.
TEST(DeferredInit, RefusesAutocastAndResultsThatResize) {
  deferred_init([] {
    auto out = torch::empty({0});
    const auto resized = error_message([&] { torch::mul_out(out, torch::ones({4}), torch::full({4}, 2.)); });
    EXPECT_TRUE(contains(resized, "resizes a tensor of sizes [0] to [4]")) << resized;
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto a = torch::full({4, 4}, 1.001);
    const auto cast = error_message([&] { torch::mm(a, a); });
    at::autocast::set_autocast_enabled(at::kCPU, before);
    EXPECT_TRUE(contains(cast, "is called under autocast")) << cast;
    return nn::Linear(4, 4);
  });
}

TEST(DeferredInit, LeavesModulesLikeAnyOthersBehind) {
  auto layer = deferred_init([] { return nn::Linear(3, 2); });
  EXPECT_TRUE(is_deferred(layer));
  EXPECT_TRUE(is_deferred(layer->weight));
  EXPECT_TRUE(layer->weight.is_cpu());
  materialize(layer);
  EXPECT_FALSE(is_deferred(layer));
  EXPECT_EQ(layer->weight.key_set(), torch::zeros({2, 3}).requires_grad_().key_set());
  EXPECT_TRUE(layer->weight.storage().resizable());
  layer(torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(layer->weight.grad().equal(torch::ones({2, 3})));
  const auto before = layer->weight.clone();
  torch::optim::SGD(layer->parameters(), 0.5).step();
  EXPECT_TRUE(layer->weight.equal(before - 0.5));
  materialize(layer); // again
  EXPECT_TRUE(layer->weight.equal(before - 0.5));
}

TEST(DeferredInit, SaysWhatToDoBeforeAParameterIsUsed) {
  auto layer = deferred_init([] { return nn::Linear(3, 2); });
  for (const auto& use : std::vector<std::function<void()>>{
           [&] {
             layer(torch::ones({1, 3}));
           },
           [&] { layer->weight.add(1); },
           [&] {
             torch::mm(torch::ones({1, 2}), layer->weight);
           },
           [&] {
             const torch::NoGradGuard no_grad;
             layer->weight.zero_();
           }}) {
    const auto message = error_message(use);
    EXPECT_TRUE(contains(message, "[aten::"));
    EXPECT_TRUE(contains(message, "call fully_shard or FullyShardedDataParallel"));
    EXPECT_TRUE(contains(message, "fsdp::materialize(module)"));
  }
  EXPECT_EQ(layer->weight.size(0), 2);
  EXPECT_EQ(torch::zeros_like(layer->weight).sum().item<float>(), 0);
  EXPECT_TRUE(is_deferred(layer));
}

struct WithMemberImpl : nn::Module {
  WithMemberImpl() : table(torch::arange(4).mul(2)) {
    register_parameter("weight", torch::ones({2}));
  }
  at::Tensor table; // not registered
};
TORCH_MODULE(WithMember);

TEST(DeferredInit, GivesTensorsThatAreNotRegisteredTheirValuesWhenTheyAreRead) {
  const auto module = deferred_init([] { return WithMember(); });
  const auto view = module->table.narrow(0, 1, 2);
  EXPECT_TRUE(is_deferred(module->table));
  EXPECT_EQ(view.sum().item<int64_t>(), 6);
  EXPECT_FALSE(is_deferred(module->table));
  module->table.add_(1);
  EXPECT_EQ(view.sum().item<int64_t>(), 8);
}

TEST(DeferredInit, GivesOneTensorItsValues) {
  torch::manual_seed(3);
  const nn::Linear ordinary(3, 2);
  torch::manual_seed(3);
  const auto layer = deferred_init([] { return nn::Linear(3, 2); });
  materialize(layer->bias);
  EXPECT_TRUE(layer->bias.equal(ordinary->bias));
  EXPECT_TRUE(is_deferred(layer->weight));
  materialize(torch::ones({2})); // nothing to do
}

/// How many hold the memory of a tensor.
size_t holders(const at::Tensor& tensor) {
  return tensor.storage().use_count();
}

TEST(DeferredInit, ForgetsHowAParameterWasMadeOnceItHasItsValues) {
  const auto outside = torch::ones({3});
  const auto before = holders(outside);
  const auto layer = deferred_init([&] {
    nn::Linear layer(3, 3);
    const torch::NoGradGuard no_grad;
    layer->bias.copy_(outside);
    return layer;
  });
  EXPECT_GT(holders(outside), before);
  materialize(layer->weight);
  EXPECT_GT(holders(outside), before);
  materialize(layer->bias);
  EXPECT_EQ(holders(outside), before);
}

TEST(DeferredInit, ForgetsWhatNobodyHolds) {
  const auto outside = torch::ones({3});
  const auto before = holders(outside);
  deferred_init([&] {
    nn::Linear dropped(3, 3), overwritten(3, 3), kept(3, 3);
    const torch::NoGradGuard no_grad;
    dropped->bias.copy_(outside);
    overwritten->bias.copy_(outside);
    overwritten->bias.mul_(2);
    EXPECT_GT(holders(outside), before);
    dropped = nullptr;
    overwritten->bias.uniform_();
    EXPECT_EQ(holders(outside), before);
    return kept;
  });
}

TEST(DeferredInit, RecordsManyWritesToOneParameter) {
  expect_same_construction([] {
    auto module = std::make_shared<nn::Module>();
    auto weight = module->register_buffer("weight", torch::zeros({50, 40}));
    for (int i = 0; i < 50; ++i) {
      for (int j = 0; j < 40; ++j) {
        weight[i][j] = i * j;
      }
    }
    auto counter = module->register_buffer("counter", torch::zeros({}));
    for (int i = 0; i < 30000; ++i) { // each within the one before, were they freed so
      counter.add_(1);
    }
    return module;
  });
}

TEST(DeferredInit, EndsWithItsFunction) {
  struct Interrupted {};
  EXPECT_THROW(deferred_init([]() -> nn::Linear { throw Interrupted(); }), Interrupted);
  EXPECT_FALSE(is_deferred(torch::ones({2})));
  const auto inner = deferred_init([] {
    auto inner = deferred_init([] { return nn::Linear(2, 2); });
    EXPECT_TRUE(is_deferred(torch::ones({2})));
    return inner;
  });
  EXPECT_TRUE(is_deferred(inner));
  EXPECT_FALSE(is_deferred(torch::ones({2})));
}

TEST(DeferredInit, IsOfItsThread) {
  deferred_init([] {
    std::thread([] { EXPECT_FALSE(is_deferred(torch::ones({2}))); }).join();
    return nn::Linear(2, 2);
  });
}

TEST(DeferredInit, GivesValuesOnAnotherThread) {
  torch::manual_seed(4);
  const nn::Linear ordinary(30, 20);
  torch::manual_seed(4);
  const auto layer = deferred_init([] { return nn::Linear(30, 20); });
  std::thread([&] { materialize(layer); }).join();
  EXPECT_TRUE(layer->weight.equal(ordinary->weight));
}

TEST(DeferredInit, GivesValuesWhileAnotherThreadDraws) {
  const auto draw = [] {
    torch::manual_seed(4);
    auto module = std::make_shared<nn::Module>();
    for (int i = 0; i < 100; ++i) {
      const auto name = std::to_string(i);
      module->register_buffer("rand" + name, torch::rand({3}));
      module->register_buffer("randint" + name, torch::randint(3, 90, {3}));
      module->register_buffer("randperm" + name, torch::randperm(9));
      module->register_parameter("randn" + name, torch::randn({3}));
    }
    return module;
  };
  const auto ordinary = draw();
  const auto module = deferred_init(draw);
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) {
      torch::rand({1});
    }
  });
  materialize(*module);
  done = true;
  other.join();
  for (const auto& item : ordinary->named_buffers()) {
    EXPECT_TRUE(module->named_buffers()[item.key()].equal(item.value())) << item.key();
  }
  for (const auto& item : ordinary->named_parameters()) {
    EXPECT_TRUE(module->named_parameters()[item.key()].equal(item.value())) << item.key();
  }
}

TEST(DeferredInit, RefusesToForgetAGraph) {
  nn::Linear layer{nullptr};
  const auto product = deferred_init([&] {
    layer = nn::Linear(2, 2);
    return layer->weight * 2;
  });
  EXPECT_TRUE(product.requires_grad());
  EXPECT_FALSE(product.is_leaf());
  materialize(product);
  try {
    product.sum().backward();
    ADD_FAILURE() << "the graph was recorded nowhere";
  } catch (const std::exception& error) {
    EXPECT_TRUE(contains(error.what(), "recorded without its graph"));
  }
  try {
    deferred_init([] { return nn::Linear(2, 2)->weight.mul_(2); });
    ADD_FAILURE() << "a leaf was written";
  } catch (const std::exception& error) {
    EXPECT_TRUE(contains(error.what(), "a leaf Variable that requires grad"));
  }
}

TEST(DeferredInit, ShowsMistakesAsAnOrdinaryConstruction) {
  EXPECT_THROW(deferred_init([] { return torch::ones({2}) + torch::ones({3}); }), c10::Error);
  EXPECT_THROW(deferred_init([] { return torch::ones({2}).view({3}); }), c10::Error);
}

} // namespace
} // namespace fsdp::testing
