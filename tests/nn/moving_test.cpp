// module->to(...) after fully_shard: what is registered gets other data, and nothing else changes for its users.

#include <chrono>
#include <functional>
#include <thread>

#include <torch/script.h>

#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"
#include "support/selected.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

using Move = std::function<void(nn::Module&)>;

/// A recurrent module of any kind, as a function of a sequence.
struct Recurrent {
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> run;
};

template <typename Holder>
Recurrent recurrent(Holder holder) {
  return {holder.ptr(), [holder](const at::Tensor& x) mutable { return std::get<0>(holder->forward(x)); }};
}

template <typename Holder>
Recurrent packed(Holder holder) {
  return {holder.ptr(), [holder](const at::Tensor& x) mutable {
            const auto packed = nn::utils::rnn::pack_padded_sequence(x, torch::tensor({4, 2}));
            return std::get<0>(holder->forward_with_packed_input(packed)).data();
          }};
}

template <typename Holder>
Recurrent cell(Holder holder) {
  return {holder.ptr(), [holder](const at::Tensor& x) mutable {
            const auto state = holder->forward(x[0]);
            if constexpr (std::is_same_v<Holder, nn::LSTMCell>) {
              return std::get<0>(state);
            } else {
              return state;
            }
          }};
}

const std::vector<std::pair<std::string, std::function<Recurrent()>>>& kinds() {
  static const std::vector<std::pair<std::string, std::function<Recurrent()>>> all = {
      {"lstm", [] { return recurrent(nn::LSTM(5, 6)); }},
      {"lstm of two directions, layers and a projection",
       [] { return recurrent(nn::LSTM(nn::LSTMOptions(5, 6).num_layers(2).bidirectional(true).proj_size(3))); }},
      {"lstm without biases", [] { return recurrent(nn::LSTM(nn::LSTMOptions(5, 6).bias(false))); }},
      {"lstm of packed sequences", [] { return packed(nn::LSTM(5, 6)); }},
      {"gru", [] { return recurrent(nn::GRU(nn::GRUOptions(5, 7).num_layers(2).bidirectional(true))); }},
      {"gru of packed sequences", [] { return packed(nn::GRU(5, 6)); }},
      {"rnn", [] { return recurrent(nn::RNN(5, 6)); }},
      {"rnn of two layers, relu",
       [] { return recurrent(nn::RNN(nn::RNNOptions(5, 6).num_layers(2).nonlinearity(torch::kReLU))); }},
      {"lstm cell", [] { return cell(nn::LSTMCell(5, 6)); }},
      {"gru cell", [] { return cell(nn::GRUCell(5, 6)); }},
      {"rnn cell", [] { return cell(nn::RNNCell(5, 6)); }},
  };
  return all;
}

const std::vector<std::pair<std::string, Move>>& moves() {
  static const std::vector<std::pair<std::string, Move>> all = {
      {"to the device it is on", [](nn::Module& module) { module.to(torch::kCPU); }},
      {"to another dtype", [](nn::Module& module) { module.to(torch::kDouble); }},
      {"to both", [](nn::Module& module) { module.to(torch::kCPU, torch::kDouble); }},
      {"there and back",
       [](nn::Module& module) {
         module.to(torch::kDouble);
         module.to(torch::kFloat);
       }},
  };
  return all;
}

Recurrent seeded(const std::function<Recurrent()>& make) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(1);
  return make();
}

/// Of the whole gradient. Collective.
double norm_of_gradients(const nn::Module& module) {
  double squares = 0;
  for (const auto& parameter : parameters(module)) {
    const auto gradient = is_sharded(parameter) ? sharded(parameter).full_grad() : parameter.grad();
    squares += gradient.to(torch::kDouble).pow(2).sum().item<double>();
  }
  return std::sqrt(squares);
}

/// Losses of each step, and the norms of its gradients. `moved`: before these steps, before gradients are dropped.
std::vector<double> train(Recurrent& model, const Move& move, const std::set<int>& moved) {
  std::vector<double> seen;
  auto shards = parameters(*model.module);
  torch::optim::SGD optimizer(shards, 0.25);
  for (int step = 0; step < 5; ++step) {
    if (moved.count(step) > 0) {
      move(*model.module);
      if (step == 0) { // before the first operator
        shards = parameters(*model.module);
      }
    }
    optimizer.zero_grad();
    const auto x = subjects::data(0, step, {4, 2, 5}).to(shards[0].scalar_type());
    const auto loss = model.run(x).pow(2).mean();
    seen.push_back(loss.item<double>());
    loss.backward();
    seen.push_back(norm_of_gradients(*model.module));
    optimizer.step();
  }
  return seen;
}

void expect_close(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 1e-5 * std::abs(expected[i])) << i << " on rank " << rank();
  }
}

class Moving : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Moving, ::testing::Values(1, 2, 3));

/// Before which steps a module moves.
const std::set<int> kMoments[] = {{0}, {2}, {0, 1, 3}};

/// Numbers of a kind, a move and of moments.
using Case = std::array<int, 3>;

std::vector<Case> all_cases() {
  std::vector<Case> all;
  for (int kind = 0; kind < static_cast<int>(kinds().size()); ++kind) {
    for (int move = 0; move < static_cast<int>(moves().size()); ++move) {
      for (int moment = 0; moment < static_cast<int>(std::size(kMoments)); ++moment) {
        all.push_back({kind, move, moment});
      }
    }
  }
  return all;
}

/// Each kind moves in each way, at some moments or others.
std::vector<Case> each_move_of_each_kind() {
  auto some = all_cases();
  std::erase_if(some, [](const Case& c) { return !wants_all_combinations() && c[2] != (c[0] + c[1]) % 3; });
  return some;
}

/// Each kind moves in one way.
std::vector<Case> each_kind() {
  auto some = each_move_of_each_kind();
  std::erase_if(some, [](const Case& c) { return !wants_all_combinations() && c[1] != c[0] % 4; });
  return some;
}

void expect_recurrent_modules_to_train_on(
    const std::vector<Case>& cases, const std::function<FullyShardOptions()>& options) {
  for (const Case& each : cases) {
    const auto& [kind, make] = kinds()[each[0]];
    const auto& [name, move] = moves()[each[1]];
    const std::set<int>& moved = kMoments[each[2]];
    SCOPED_TRACE(::testing::Message() << kind << " " << name << ", first before step " << *moved.begin());
    Recurrent plain = seeded(make), model = seeded(make);
    fully_shard(*model.module, options());
    const auto expected = train(plain, move, moved);
    expect_close(train(model, move, moved), expected);
    for (const auto& [path, shard] : named_parameters(*model.module)) {
      ASSERT_TRUE(is_sharded(shard)) << path;
      const auto whole = sharded(shard).full_tensor();
      EXPECT_TRUE(torch::allclose(whole, plain.module->named_parameters()[path], 1e-4, 1e-6)) << path;
    }
  }
}

TEST_P(Moving, RecurrentModulesTrainOn) {
  on_threads(GetParam(), [cases = GetParam() == 2 ? each_move_of_each_kind() : each_kind()] {
    expect_recurrent_modules_to_train_on(cases, [] { return FullyShardOptions{}; });
  });
}

TEST(Moving, RecurrentModulesTrainOnOverGloo) {
  const auto body = [] {
    init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(60)});
    expect_recurrent_modules_to_train_on(each_kind(), [] { return FullyShardOptions{}; });
    shutdown();
  };
  on_processes(2, body, {.timeout = std::chrono::minutes(8)});
}

// Shards are as large as the wholes: what takes them for the members trains each replica alone.
TEST(Moving, RecurrentModulesOfReplicasStayAlike) {
  on_threads(2, [] {
    const auto mesh = init_device_mesh("cpu", {2, 1}, {"replicate", "shard"});
    expect_recurrent_modules_to_train_on(each_kind(), [&] { return FullyShardOptions{.mesh = mesh}; });
    Recurrent model = seeded(kinds()[0].second);
    fully_shard(*model.module, {.mesh = mesh});
    model.module->to(torch::kCPU);
    for (int step = 0; step < 2; ++step) { // ranks have different data
      model.run(subjects::data(rank(), step, {4, 2, 5})).pow(2).mean().backward();
      torch::NoGradGuard no_grad;
      for (auto& shard : model.module->parameters()) {
        shard.sub_(shard.grad());
      }
    }
    const auto mine = model.module->parameters()[0].detach().clone();
    auto others = mine.clone();
    mesh.group(0)->broadcast(others, 0, {"test", ""});
    EXPECT_TRUE(torch::equal(mine, others));
  });
}

// Nobody keeps them any longer then: with the module goes the unit.
TEST_P(Moving, AfterAForwardARecurrentModuleHoldsItsHandlesAgain) {
  on_threads(GetParam(), [] {
    for (const bool in_a_model : {false, true}) {
      std::weak_ptr<engine::Unit> unit;
      {
        nn::LSTM model(5, 6);
        nn::Sequential above(model);
        unit = fully_shard(*model).unit();
        if (in_a_model) {
          fully_shard(*above);
        }
        for (int round = 0; round < 2; ++round) {
          above->to(torch::kCPU);
          EXPECT_FALSE(unit.expired());
          std::get<0>(model->forward(torch::ones({3, 1, 5}))).sum().backward();
        }
      }
      EXPECT_TRUE(unit.expired());
    }
  });
}

TEST_P(Moving, ARecurrentModuleWhileItIsShownWhole) {
  on_threads(GetParam(), [] {
    nn::LSTM model(5, 6);
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.fill_(0.25);
      }
    }
    const auto x = torch::ones({3, 1, 5});
    const auto run = [&] { return std::get<0>(model->forward(x)); };
    const auto expected = run();
    fully_shard(*model);
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      {
        const auto guard = summon_full_params(*model);
        model->to(dtype);
      }
      model->zero_grad();
      const auto y = run();
      EXPECT_TRUE(torch::equal(y, expected));
      y.sum().backward();
      EXPECT_TRUE(model->parameters()[0].grad().defined());
    }
  });
}

TEST_P(Moving, AModelThatIsDroppedAfterwardsIsFreed) {
  on_threads(GetParam(), [] {
    std::weak_ptr<engine::Unit> unit;
    {
      nn::LSTM model(5, 6);
      unit = fully_shard(*model).unit();
      model->to(torch::kCPU);
    }
    nn::Linear next(2, 2);
    fully_shard(*next);
    for (int i = 0; i < 10000 && !unit.expired(); ++i) { // another rank of this process may be about to free it
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(unit.expired());
  });
}

// As cuDNN wants weights: to lie in a row.
TEST(Moving, WeightsArePutInARowByNobody) {
  on_threads(2, [] {
    nn::LSTM model(5, 6);
    fully_shard(*model);
    const auto flatten = [](const std::vector<at::Tensor>& weights) {
      return at::_cudnn_rnn_flatten_weight(weights, 4, 5, 2, 6, 0, 1, false, false);
    };
    EXPECT_NO_THROW(flatten(model->parameters()));
    EXPECT_NO_THROW(flatten({handle_of(model->parameters()[0])}));
  });
}

TEST_P(Moving, ShardsAreKnownBeforeTheNextOperator) {
  on_threads(GetParam(), [] {
    const auto make = [] {
      nn::Linear model(7, 5);
      torch::NoGradGuard no_grad;
      model->weight.copy_(torch::arange(35, torch::kFloat).view({5, 7}));
      model->bias.fill_(1);
      return model;
    };
    nn::Linear model = make(), plain = make();
    fully_shard(*model);
    for (auto* each : {&model, &plain}) {
      (*each)->forward(torch::ones({2, 7})).sum().backward();
      (*each)->to(torch::kDouble);
    }
    const auto shards = model->parameters();
    for (size_t i = 0; i < shards.size(); ++i) {
      ASSERT_TRUE(is_sharded(shards[i]));
      const auto whole = sharded(shards[i]);
      EXPECT_EQ(whole.dtype(), torch::kDouble);
      EXPECT_EQ(whole.name, i == 0 ? "weight" : "bias");
      EXPECT_TRUE(torch::equal(whole.full_tensor(), plain->parameters()[i]));
    }
    EXPECT_NEAR(norm_of_gradients(*model), norm_of_gradients(*plain), 1e-6);
    EXPECT_TRUE(torch::equal(
        model->forward(torch::ones({2, 7}, torch::kDouble)), plain->forward(torch::ones({2, 7}, torch::kDouble))));
  });
}

TEST_P(Moving, AnOptimizerMayStepBeforeTheNextOperator) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(1);
    }
    fully_shard(*model);
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    model->forward(torch::ones({2, 5})).sum().backward(); // 2 for each weight
    model->to(torch::kDouble);
    for (auto& shard : model->parameters()) {
      shard.mutable_grad() = shard.grad().to(torch::kDouble);
    }
    optimizer.step();
    EXPECT_TRUE(torch::equal(whole_of(*model, "weight"), torch::zeros({3, 5}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(model->weight + 0, torch::zeros({3, 5}, torch::kDouble)));
  });
}

// These read what is registered: the handles.
TEST_P(Moving, ListsOfParameters) {
  on_threads(GetParam(), [] {
    nn::ParameterList model;
    model->append(torch::arange(12, torch::kFloat).view({4, 3}).requires_grad_());
    model->append(torch::ones({3}).requires_grad_());
    fully_shard(*model);
    for (const auto dtype : {torch::kDouble, torch::kFloat}) {
      const auto before = parameters(*model);
      model->to(torch::kCPU);
      model->to(dtype);
      const auto x = torch::ones({2, 4}, dtype);
      const auto y = torch::matmul(x, model[0]) + model[1];
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(torch::equal(y[0], torch::tensor({19, 23, 27}, dtype)));
      y.sum().backward();
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(parameters(*model)[i].is_same(before[i]));
        EXPECT_EQ(before[i].scalar_type(), dtype);
        EXPECT_TRUE(before[i].grad().defined());
        before[i].mutable_grad().reset();
      }
    }
  });
}

TEST_P(Moving, ListsOfParametersWhileTheyAreShownWhole) {
  on_threads(GetParam(), [] {
    nn::ParameterList model;
    model->append(torch::ones({4, 3}).requires_grad_());
    fully_shard(*model);
    const std::vector<std::function<void()>> gives = {
        [&] { model->to(torch::kDouble); },
        [&] {
          model[0].set_data(torch::full({4, 3}, 2.0));
        },
    };
    for (size_t i = 0; i < gives.size(); ++i) {
      {
        const auto guard = summon_full_params(*model);
        gives[i]();
        EXPECT_TRUE(torch::equal(model[0], torch::full({4, 3}, 1.0 + i)));
      }
      EXPECT_TRUE(torch::equal(whole_of(*model, "0"), torch::full({4, 3}, 1.0 + i)));
      model[0].sum().backward();
      EXPECT_TRUE(parameters(*model)[0].grad().defined());
      model->zero_grad();
    }
    EXPECT_TRUE(contains(
        error_message([&] {
          const auto guard = summon_full_params(*model);
          model[0].set_data(torch::ones({2, 4}));
        }),
        "'0' has sizes [4, 3]"));
  });
}

TEST_P(Moving, TorchScript) {
  on_threads(GetParam(), [] {
    torch::jit::Module model("Scaled");
    model.register_parameter(
        "weight", torch::arange(6, torch::kFloat).view({3, 2}).requires_grad_(), /*is_buffer=*/false);
    model.define("def forward(self, x):\n  return x * self.weight\n");
    fully_shard(model);
    model.to(torch::kDouble);
    const auto y = model.forward({torch::ones({3, 2}, torch::kDouble)}).toTensor();
    EXPECT_TRUE(torch::equal(y, torch::arange(6, torch::kDouble).view({3, 2})));
    y.sum().backward();
    EXPECT_EQ(parameters(model)[0].scalar_type(), torch::kDouble);
    EXPECT_TRUE(parameters(model)[0].grad().defined());
  });
}

TEST_P(Moving, DataGivenToAMemberAreValuesOfTheWhole) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    fully_shard(*model);
    for (int step = 0; step < 3; ++step) {
      const auto values = torch::full({4, 4}, 0.5 * step);
      model->weight.set_data(values);
      EXPECT_TRUE(torch::equal(whole_of(*model, "weight"), values));
      const auto x = torch::ones({1, 4});
      EXPECT_TRUE(torch::equal(model->weight.sum(), values.sum()));
      model->forward(x).sum().backward();
      EXPECT_TRUE(model->parameters()[0].grad().defined());
    }
    EXPECT_TRUE(contains(
        error_message([&] {
          model->weight.set_data(torch::ones({2, 4}));
        }),
        "'weight' has sizes [4, 4]"));
  });
}

// As a target network gets the values of the one that is trained.
TEST_P(Moving, DataOfAnotherModelsMemberAreItsValuesOfThatMoment) {
  on_threads(GetParam(), [] {
    nn::Linear online(4, 3), target(4, 3);
    const auto fill = [](nn::Linear& model, double value) {
      torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) {
        shard.fill_(value);
      }
    };
    fully_shard(*online);
    fully_shard(*target);
    fill(target, 1);
    fill(online, 3);
    target->weight.set_data(online->weight);
    target->bias.set_data(online->bias.data());
    fill(online, 5);
    EXPECT_TRUE(torch::equal(target->forward(torch::ones({1, 4})), torch::full({1, 3}, 15.0)));
    EXPECT_TRUE(torch::equal(whole_of(*target, "weight"), torch::full({3, 4}, 3.0)));
    EXPECT_TRUE(torch::equal(whole_of(*target, "bias"), torch::full({3}, 3.0)));
    target->forward(torch::ones({1, 4})).sum().backward();
    for (const auto& shard : target->parameters()) {
      EXPECT_TRUE(shard.grad().defined());
    }
    const auto shard = target->parameters()[0];
    target->weight.set_data(target->weight); // as `to()` does where nothing changes
    EXPECT_TRUE(target->parameters()[0].is_same(shard));
    EXPECT_TRUE(torch::equal(target->weight, torch::full({3, 4}, 3.0)));
  });
}

} // namespace
} // namespace fsdp::testing
