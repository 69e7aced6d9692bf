// Files of models hold whole parameters: what would write or read pieces in their place is an error there and then.

#include <unistd.h>

#include <filesystem>
#include <sstream>

#include "nn/parity.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

struct NetImpl : nn::Cloneable<NetImpl> {
  NetImpl() {
    NetImpl::reset();
  }
  void reset() override {
    fc = register_module("fc", nn::Linear(6, 6));
    norm = register_module("norm", nn::BatchNorm1d(6));
    scale = register_parameter("scale", torch::full({6}, 2.0));
  }
  nn::Linear fc{nullptr};
  nn::BatchNorm1d norm{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

Net filled(double value) {
  Net net;
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) {
    parameter.fill_(value);
  }
  return net;
}

Net filled_and_sharded(double value) {
  Net net = filled(value);
  fully_shard(net->fc);
  fully_shard(net);
  return net;
}

template <typename Value>
std::string file_of(const Value& value) {
  std::ostringstream file;
  torch::save(value, file);
  return file.str();
}

template <typename Value>
void load_from(const std::string& file, Value& value) {
  std::istringstream stream(file);
  torch::load(value, stream);
}

void expect_all(const Net& net, double value) {
  for (const auto& [name, shard] : named_parameters(net)) {
    EXPECT_TRUE(torch::equal(shard, torch::full_like(shard, value))) << name;
  }
}

class Files : public ::testing::TestWithParam<int> {};

TEST_P(Files, OfShardedModulesAreNotSaved) {
  on_threads(GetParam(), [] {
    const Net net = filled_and_sharded(1);
    const auto message = error_message([&] { file_of(net); });
    EXPECT_TRUE(contains(message, "[torch::save] expected a module with whole parameters"));
    EXPECT_TRUE(contains(message, "'scale' is sharded"));
    EXPECT_TRUE(contains(message, "fsdp::summon_full_params(model"));
    EXPECT_TRUE(contains(error_message([&] { file_of(net->fc); }), "'fc.weight' is sharded"));
  });
}

TEST_P(Files, WithAShardedModuleInThemAreNotSaved) {
  on_threads(GetParam(), [] {
    const Net net = filled_and_sharded(1);
    torch::serialize::OutputArchive checkpoint, model;
    net->save(model);
    checkpoint.write("epoch", c10::IValue(3));
    checkpoint.write("model", model);
    std::ostringstream file;
    EXPECT_TRUE(contains(error_message([&] { checkpoint.save_to(file); }), "[torch::save] expected a module"));
  });
}

TEST_P(Files, OfSummonedModulesAreThoseOfPlainOnes) {
  on_threads(GetParam(), [] {
    const Net net = filled_and_sharded(1);
    std::string file;
    {
      const auto guard = summon_full_params(net, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      if (rank() == 0) {
        file = file_of(net);
      } else if (world_size() > 1) {
        EXPECT_TRUE(contains(error_message([&] { file_of(net); }), "[torch::save] expected a module"));
      }
    }
    if (rank() == 0) {
      Net plain = filled(0);
      load_from(file, plain);
      for (const auto& parameter : plain->parameters()) {
        EXPECT_TRUE(torch::equal(parameter, torch::ones_like(parameter)));
      }
    }
    EXPECT_TRUE(contains(error_message([&] { file_of(net); }), "[torch::save] expected a module"));
  });
}

TEST_P(Files, OfPiecesAreSavedAndLoaded) {
  on_threads(GetParam(), [] {
    Net net = filled_and_sharded(1);
    const auto shards = parameters(net);
    const auto file = file_of(shards), one = file_of(shards[1]);
    std::vector<at::Tensor> loaded;
    load_from(file, loaded);
    ASSERT_EQ(loaded.size(), shards.size());
    for (size_t i = 0; i < shards.size(); ++i) {
      EXPECT_TRUE(torch::equal(loaded[i], shards[i]));
    }
    {
      const torch::NoGradGuard no_grad;
      shards[1].fill_(5);
    }
    at::Tensor shard = shards[1];
    load_from(one, shard); // into the shard itself
    expect_all(net, 1);
    EXPECT_TRUE(torch::equal(net->fc->weight, torch::ones({6, 6})));
  });
}

TEST_P(Files, OfPlainModulesAreNotLoadedIntoShards) {
  on_threads(GetParam(), [] {
    const auto file = file_of(filled(3));
    Net net = filled_and_sharded(1);
    const auto message = error_message([&] { load_from(file, net); });
    EXPECT_TRUE(contains(message, "[torch::load] expected this rank's piece of 'scale'"));
    EXPECT_TRUE(contains(message, "`auto guard = fsdp::summon_full_params(model);`"));
    expect_all(net, 1);
  });
}

TEST_P(Files, OfPlainModulesAreLoadedIntoSummonedOnes) {
  on_threads(GetParam(), [] {
    const auto file = file_of(filled(3));
    Net net = filled_and_sharded(1);
    {
      const auto guard = summon_full_params(net);
      load_from(file, net);
    }
    expect_all(net, 3);
    EXPECT_TRUE(torch::equal(net->scale, torch::full({6}, 3.0)));
  });
}

// These have handles registered, which are wholes to whoever gives them data.
TEST_P(Files, OfListsOfParametersAreLoadedIntoShardedOnes) {
  on_threads(GetParam(), [] {
    const auto list_of = [](double value) {
      nn::ParameterList list;
      list->append(torch::full({4, 3}, value).requires_grad_());
      return list;
    };
    nn::ParameterList list = list_of(1);
    fully_shard(list);
    const auto expect_loaded = [&](double value) {
      EXPECT_TRUE(torch::equal(whole_of(*list, "0"), torch::full({4, 3}, value)));
      EXPECT_TRUE(torch::equal(list[0], torch::full({4, 3}, value)));
      list[0].sum().backward();
      EXPECT_TRUE(parameters(list)[0].grad().defined());
    };
    load_from(file_of(list_of(3)), list);
    expect_loaded(3);
    {
      const auto guard = summon_full_params(list);
      load_from(file_of(list_of(5)), list);
      EXPECT_TRUE(torch::equal(list[0], torch::full({4, 3}, 5.0)));
    }
    expect_loaded(5);
  });
}

TEST_P(Files, AreNoDetourAroundClone) {
  on_threads(GetParam(), [] {
    const Net net = filled_and_sharded(1);
    const std::vector<std::function<void()>> copies{[&] { net->clone(); }, [&] { net->clone(torch::kMeta); }};
    for (const auto& copy : copies) {
      const auto message = error_message(copy);
      EXPECT_TRUE(contains(message, "[Module::clone] expected a module that is not sharded"));
      EXPECT_TRUE(contains(message, "fsdp::clone(model)"));
    }
    expect_all(net, 1);
    const auto guard = summon_full_params(net);
    for (const auto& parameter : net->clone()->parameters()) {
      EXPECT_TRUE(torch::equal(parameter, torch::ones_like(parameter)));
    }
  });
}

TEST_P(Files, CopiesOfShardsAreTensorsLikeAnyOthers) {
  on_threads(GetParam(), [] {
    const Net net = filled_and_sharded(1);
    const auto shard = parameters(net)[0];
    at::Tensor other = torch::zeros_like(shard.detach().clone());
    const auto copy = shard.clone();
    other.set_data(copy);
    EXPECT_TRUE(torch::equal(other, shard));
  });
}

// Where the rank's piece is the whole, load and clone do what they should.
INSTANTIATE_TEST_SUITE_P(Ranks, Files, ::testing::Values(2, 3));

TEST(FilesOfOneRank, AreRightOrRefused) {
  on_threads(1, [] {
    const auto file = file_of(filled(3));
    Net net = filled_and_sharded(1);
    const auto path = std::filesystem::temp_directory_path() / ("fsdp-files-" + std::to_string(getpid()));
    EXPECT_TRUE(contains(error_message([&] { torch::save(net, path.string()); }), "[torch::save] expected a module"));
    std::filesystem::remove(path);
    load_from(file, net);
    EXPECT_TRUE(torch::equal(net->scale, torch::full({6}, 3.0)));
    expect_all(net, 3);
    for (const auto& parameter : net->clone()->parameters()) {
      EXPECT_TRUE(torch::equal(parameter, torch::full_like(parameter, 3)));
    }
  });
}

} // namespace
} // namespace fsdp::testing
