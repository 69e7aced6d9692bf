// Modules of many kinds train as they are, on 1 to 4 ranks, bit for bit as unsharded.

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using subjects::subject_of;

class Modules : public ::testing::TestWithParam<int> {
 protected:
  void train(MakeSubject make, FullyShardOptions options = {}) {
    expect_parity({.make = std::move(make), .options = std::move(options)}, GetParam());
  }
};

TEST_P(Modules, ConvolutionsWithNorms) {
  train(&subjects::convolutions);
}

TEST_P(Modules, Recurrent) {
  train(&subjects::recurrent);
}

// Buffers are not sharded: each rank has the statistics of its own batches, as in an unsharded model that sees these.
TEST_P(Modules, BatchNormKeepsStatisticsOfItsRank) {
  on_threads(GetParam(), [] {
    nn::BatchNorm1d sharded_norm(6), plain(6);
    fully_shard(*sharded_norm);
    for (int step = 0; step < 3; ++step) {
      const auto batch = subjects::data(rank(), step, {4, 6});
      EXPECT_TRUE(torch::equal(sharded_norm(batch), plain(batch)));
    }
    EXPECT_TRUE(torch::equal(sharded_norm->running_mean, plain->running_mean));
    EXPECT_TRUE(torch::equal(sharded_norm->running_var, plain->running_var));
    EXPECT_EQ(sharded_norm->num_batches_tracked.item<int64_t>(), 3);
    sharded_norm->eval();
    plain->eval();
    const auto batch = subjects::data(rank(), 3, {4, 6});
    EXPECT_TRUE(torch::equal(sharded_norm(batch), plain(batch)));
  });
}

TEST_P(Modules, Transformer) {
  train([] {
    nn::TransformerEncoderLayer first(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(10).dropout(0.0));
    nn::TransformerDecoderLayer second(nn::TransformerDecoderLayerOptions(8, 2).dim_feedforward(10).dropout(0.0));
    struct BothImpl : nn::Module {};
    auto both = std::make_shared<BothImpl>();
    both->register_module("first", first);
    both->register_module("second", second);
    return subject_of(
        both,
        [first, second, both](int rank, int step) mutable {
          auto x = subjects::data(rank, step, {5, 2, 8});
          return second->forward(x, first->forward(x)).pow(2).mean();
        },
        {first.ptr(), second.ptr()});
  });
}

struct ListsImpl : nn::Module {
  ListsImpl() {
    list = register_module("list", nn::ParameterList());
    dict = register_module("dict", nn::ParameterDict());
    for (int i = 0; i < 3; ++i) {
      list->append(torch::randn({3, i + 1}).requires_grad_());
    }
    dict->insert("bias", torch::randn({3}).requires_grad_());
    dict->insert("zero_dim", torch::randn({}).requires_grad_());
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = dict["bias"] * dict["zero_dim"];
    for (const auto& item : *list) {
      y = y + torch::matmul(x.narrow(1, 0, item.value().size(1)), item.value().t());
    }
    return y;
  }
  nn::ParameterList list{nullptr};
  nn::ParameterDict dict{nullptr};
};

TEST_P(Modules, ParameterListsAndDicts) {
  train([] {
    auto net = std::make_shared<ListsImpl>();
    return subject_of(
        net,
        [net](int rank, int step) {
          return net->forward(subjects::data(rank, step, {4, 5})).pow(2).mean();
        },
        {net->list.ptr()});
  });
}

TEST_P(Modules, OddParameters) {
  train(&subjects::odd);
}

TEST_P(Modules, OddParametersCutAlongTheLastDimension) {
  FullyShardOptions options;
  options.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) -> std::optional<ShardPlacement> {
    return parameter.dim() == 0 ? std::nullopt : std::optional(ShardPlacement{-1});
  };
  train(&subjects::odd, options);
}

TEST_P(Modules, WeightsTiedAcrossUnits) {
  train([] {
    struct NetImpl : nn::Module {
      NetImpl() {
        first = register_module("first", nn::Linear(5, 5));
        middle = register_module("middle", nn::Linear(5, 5));
        last = register_module("last", nn::Linear(5, 5));
        last->weight = first->weight;
        last->named_parameters(); // its registered weight stays a parameter of its own, which nobody uses
      }
      nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
    };
    auto net = std::make_shared<NetImpl>();
    return subject_of(
        net,
        [net](int rank, int step) {
          return net->last(torch::tanh(net->middle(net->first(subjects::data(rank, step, {3, 5}))))).pow(2).mean();
        },
        {net->first.ptr(), net->middle.ptr(), net->last.ptr()});
  });
}

// What is registered in the head, no member holds: no handle would keep its unit.
TEST_P(Modules, AHeadWithoutBiasThatReadsTheWeightOfAnother) {
  train([] {
    struct NetImpl : nn::Module {
      NetImpl() {
        first = register_module("first", nn::Linear(5, 5));
        head = register_module("head", nn::Linear(nn::LinearOptions(5, 5).bias(false)));
        head->weight = first->weight;
      }
      nn::Linear first{nullptr}, head{nullptr};
    };
    auto net = std::make_shared<NetImpl>();
    return subject_of(
        net,
        [net](int rank, int step) {
          return net->head(torch::tanh(net->first(subjects::data(rank, step, {3, 5})))).pow(2).mean();
        },
        {net->head.ptr()});
  });
}

/// Computes with a weight that it may share with other modules.
struct HolderImpl : nn::Module {
  explicit HolderImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  at::Tensor weight;
};
TORCH_MODULE(Holder);

// Unlike a member that is merely made equal, the weight is among the registered parameters of both.
TEST_P(Modules, AWeightRegisteredInTwoUnits) {
  train([] {
    const auto shared = torch::randn({5, 5});
    Holder first(shared), last(shared);
    nn::Linear middle(5, 5);
    auto net = std::make_shared<nn::ModuleListImpl>();
    net->push_back(first);
    net->push_back(middle);
    net->push_back(last);
    return subject_of(
        net,
        [=](int rank, int step) mutable {
          auto x = torch::matmul(subjects::data(rank, step, {3, 5}), first->weight);
          return torch::matmul(torch::tanh(middle(x)), last->weight).pow(2).mean();
        },
        {first.ptr(), middle.ptr(), last.ptr()});
  });
}

TEST_P(Modules, AModuleCalledSeveralTimes) {
  train([] {
    nn::Sequential model(nn::Linear(6, 6), nn::Linear(6, 6), nn::Linear(6, 6));
    return subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          auto x = subjects::data(rank, step, {3, 6});
          for (int i = 0; i < 3; ++i) {
            x = torch::tanh(model->forward(x));
          }
          return x.pow(2).mean();
        },
        {model[0], model[1], model[2]});
  });
}

TEST_P(Modules, SubmodulesCalledAloneAndSomeNotAtAll) {
  train([] {
    nn::Sequential model(nn::Linear(6, 6), nn::Linear(6, 6), nn::Linear(6, 6));
    return subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          return model[step % 2]->as<nn::Linear>()->forward(subjects::data(rank, step, {3, 6})).pow(2).mean();
        },
        {model[0], model[2]});
  });
}

TEST_P(Modules, SomeOutputsUnused) {
  train([] {
    nn::Sequential model(nn::Linear(6, 6), nn::Linear(6, 4));
    return subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          auto hidden = model[0]->as<nn::Linear>()->forward(subjects::data(rank, step, {3, 6}));
          auto unused = model[1]->as<nn::Linear>()->forward(hidden);
          return hidden.pow(2).mean();
        },
        {model[0], model[1]});
  });
}

struct Double : torch::autograd::Function<Double> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight * 2;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    auto saved = context->get_saved_variables();
    return {grads[0] * saved[1] * 2, (grads[0] * saved[0] * 2).sum(0)};
  }
};

// A custom function looks at its inputs before any operator does.
TEST_P(Modules, ACustomFunctionSeesWhatWasFrozenSince) {
  on_threads(GetParam(), [] {
    nn::Linear first(5, 5);
    nn::ParameterList second;
    second->append(torch::ones({5}).requires_grad_());
    nn::ModuleList model(first, second);
    for (const auto& part : *model) {
      fully_shard(*part);
    }
    fully_shard(*model);
    auto frozen = sharded(parameters(*second)[0]).local;
    for (const bool trainable : {true, false, true, true, false}) {
      frozen.set_requires_grad(trainable);
      Double::apply(first(torch::ones({2, 5})), second[0]).sum().backward();
      EXPECT_EQ(second[0].requires_grad(), trainable);
      EXPECT_EQ(sharded(frozen).full_grad().defined(), trainable);
      frozen.mutable_grad().reset();
    }
  });
}

// One that comes before all operators looks at the handle as it was; then it is frozen, and LibTorch calls what waits
// for its gradient without one.
TEST_P(Modules, ACustomFunctionBeginsAStepWithWhatWasFrozen) {
  on_threads(GetParam(), [] {
    nn::Linear first(5, 5);
    nn::ParameterList second;
    second->append(torch::ones({5}).requires_grad_());
    nn::ModuleList model(first, second);
    fully_shard(*model);
    const auto shards = parameters(*model);
    for (const bool trainable : {true, false}) {
      shards[2].set_requires_grad(trainable);
      first(Double::apply(torch::ones({2, 5}), second[0])).sum().backward();
      EXPECT_EQ(sharded(shards[2]).full_grad().defined(), trainable);
      EXPECT_TRUE(sharded(shards[0]).full_grad().defined());
      for (const auto& shard : shards) {
        shard.mutable_grad().reset();
      }
    }
  });
}

TEST_P(Modules, CustomAutogradFunction) {
  train([] {
    struct NetImpl : nn::Module {
      NetImpl() {
        weight = register_parameter("weight", torch::randn({5}));
        linear = register_module("linear", nn::Linear(5, 5));
      }
      at::Tensor weight;
      nn::Linear linear{nullptr};
    };
    auto net = std::make_shared<NetImpl>();
    return subject_of(
        net,
        [net](int rank, int step) {
          return Double::apply(net->linear(subjects::data(rank, step, {3, 5})), net->weight).pow(2).mean();
        },
        {net->linear.ptr()});
  });
}

TEST_P(Modules, SharedThroughDifferentRoots) {
  train([] {
    nn::Sequential model(nn::Linear(6, 6), nn::Linear(6, 6));
    return subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          auto x = subjects::data(rank, step, {3, 6});
          auto weight = model[0]->as<nn::Linear>()->weight;
          return (model->forward(x) + torch::matmul(x, weight + weight.t())).pow(2).mean();
        },
        {model[0], model[1]});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Modules, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
