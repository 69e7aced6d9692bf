// Parameters that travel in another form than they are stored in.

#include <atomic>
#include <mutex>

#include <torch/torch.h>

#include <fsdp/clone.h>
#include <fsdp/describe.h>
#include <fsdp/fully_shard.h>
#include <fsdp/gather_extension.h>
#include <fsdp/init.h>
#include <fsdp/sharded_tensor.h>

#include "engine/unit.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// Sends every rank's rows in half the bytes, padded to the rows of the first rank.
class InBFloat16 final : public GatherExtension {
 public:
  InBFloat16(std::vector<int64_t> sizes, int64_t padded_rows) : sizes_(std::move(sizes)), padded_rows_(padded_rows) {}

  std::vector<at::Tensor> before_gather(const at::Tensor& shard) override {
    auto sent = torch::zeros({padded_rows_, sizes_[1]}, torch::kBFloat16);
    sent.narrow(0, 0, shard.size(0)).copy_(shard);
    return {sent};
  }
  Whole after_gather(const std::vector<at::Tensor>& gathered) override {
    return {{}, {gathered.at(0).narrow(0, 0, sizes_[0]).to(torch::kFloat)}};
  }

 private:
  std::vector<int64_t> sizes_;
  int64_t padded_rows_;
};

nn::Sequential make_model() {
  static std::mutex one_generator_for_all_ranks;
  std::lock_guard lock(one_generator_for_all_ranks);
  torch::manual_seed(1);
  return nn::Sequential(nn::Linear(5, 7), nn::GELU(), nn::Linear(7, 3));
}

FullyShardOptions in_bfloat16(int ranks, int64_t too_many_rows = 0) {
  FullyShardOptions options;
  options.shard_placement_fn = [=](const at::Tensor& tensor, const std::string&) -> std::optional<ShardPlacement> {
    if (tensor.dim() != 2) {
      return std::nullopt;
    }
    const int64_t rows = (tensor.size(0) + ranks - 1) / ranks + too_many_rows;
    return ShardPlacement{.extension = std::make_shared<InBFloat16>(tensor.sizes().vec(), rows)};
  };
  return options;
}

/// The gradients that the coarse weights bring, put into the parameters that they were made of.
void coarse_backward(nn::Sequential& reference, const std::vector<at::Tensor>& batches) {
  auto coarse = make_model();
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < coarse->parameters().size(); ++i) {
    const auto exact = reference->parameters()[i];
    coarse->parameters()[i].copy_(exact.dim() == 2 ? exact.to(torch::kBFloat16) : exact);
  }
  for (const auto& batch : batches) {
    torch::AutoGradMode grad(true);
    coarse->forward(batch).pow(2).sum().backward();
  }
  for (size_t i = 0; i < coarse->parameters().size(); ++i) {
    reference->parameters()[i].mutable_grad() = coarse->parameters()[i].grad() / static_cast<double>(batches.size());
  }
}

class GatherExtensions : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GatherExtensions, ::testing::Values(1, 2, 3, 4));

TEST_P(GatherExtensions, TrainWithWhatTheyMakeOfTheShards) {
  const int ranks = GetParam();
  std::vector<at::Tensor> batches;
  for (int rank = 0; rank < ranks; ++rank) {
    batches.push_back(torch::randn({4, 5}));
  }
  on_threads(ranks, [&] {
    auto model = make_model(), reference = make_model();
    fully_shard(*model[0]->as<nn::Linear>(), in_bfloat16(ranks));
    fully_shard(*model, in_bfloat16(ranks));
    torch::optim::SGD ours(model->parameters(), 0.1), theirs(reference->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      model->forward(batches[rank()]).pow(2).sum().backward();
      coarse_backward(reference, batches);
      ours.step();
      theirs.step();
      const auto shards = model->parameters(), wholes = reference->parameters();
      for (size_t i = 0; i < shards.size(); ++i) {
        EXPECT_TRUE(torch::allclose(sharded(shards[i]).full_tensor(), wholes[i], 1e-4, 1e-5)) << step << " " << i;
      }
      ours.zero_grad();
    }
  });
}

TEST_P(GatherExtensions, TakeNoMoreMemoryThanDescribeSays) {
  on_threads(GetParam(), [] {
    auto model = make_model();
    auto root = fully_shard(*model, in_bfloat16(world_size()));
    const auto description = describe(*model);
    root.unshard();
    int64_t bytes = 0;
    for (const auto& whole : {model[0]->as<nn::Linear>()->weight, model[2]->as<nn::Linear>()->weight}) {
      bytes += static_cast<int64_t>(whole.nbytes());
    }
    EXPECT_GE(root.unit()->whole_bytes(), bytes);
    EXPECT_GE(description.bytes_peak, 2 * description.bytes_shard + root.unit()->whole_bytes());
  });
}

TEST_P(GatherExtensions, MakeNoWholeThatCouldBeWritten) {
  on_threads(GetParam(), [&] {
    auto model = make_model();
    fully_shard(*model, in_bfloat16(GetParam()));
    torch::NoGradGuard no_grad;
    const auto said = error_message([&] { model[0]->as<nn::Linear>()->weight.zero_(); });
    EXPECT_TRUE(contains(said, "made by an all-gather extension"));
  });
}

TEST_P(GatherExtensions, KeepNoMoreThanTheirShards) {
  on_threads(GetParam(), [&] {
    auto model = make_model();
    size_t gone = 0;
    for (auto& whole : model->parameters()) {
      const auto memory = whole.detach();
      whole.set_data(torch::from_blob(memory.data_ptr(), memory.sizes(), [memory, &gone](void*) { ++gone; }));
    }
    fully_shard(*model, in_bfloat16(GetParam()));
    EXPECT_EQ(gone, model->parameters().size());
  });
}

TEST_P(GatherExtensions, CannotBeCloned) {
  on_threads(GetParam(), [&] {
    auto model = make_model();
    fully_shard(*model, in_bfloat16(GetParam()));
    const auto said = error_message([&] { fsdp::clone(*model); });
    EXPECT_TRUE(contains(said, "[clone] '0.weight' is gathered by a GatherExtension"));
    EXPECT_TRUE(contains(said, "load its state_dict"));
  });
}

TEST(GatherExtension, RanksThatSendDifferentSizesAreTold) {
  std::atomic<int> next = 0;
  const auto said = error_message([&] {
    on_threads(2, [&] {
      const int64_t more = next++;
      auto model = make_model();
      fully_shard(*model, in_bfloat16(2, more));
    });
  });
  EXPECT_TRUE(contains(said, "same sizes and dtypes on every rank"));
}

TEST_P(GatherExtensions, LeaveTheOtherParametersOfTheirUnitWritable) {
  on_threads(GetParam(), [&] {
    auto model = make_model();
    auto unit = fully_shard(*model, in_bfloat16(GetParam()));
    {
      torch::NoGradGuard no_grad;
      model[0]->as<nn::Linear>()->bias.fill_(2);
      model[2]->as<nn::Linear>()->bias.fill_(3);
    }
    unit.reset_iter_state();
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[1]).full_tensor(), torch::full({7}, 2.0)));
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[3]).full_tensor(), torch::full({3}, 3.0)));
  });
}

enum class Moment : char { kNever, kBefore, kAfter };

class Failing final : public GatherExtension {
 public:
  Failing(std::shared_ptr<GatherExtension> base, std::shared_ptr<Moment> fails)
      : base_(std::move(base)), fails_(std::move(fails)) {}
  std::vector<at::Tensor> before_gather(const at::Tensor& shard) override {
    fail(Moment::kBefore);
    return base_->before_gather(shard);
  }
  Whole after_gather(const std::vector<at::Tensor>& gathered) override {
    fail(Moment::kAfter);
    return base_->after_gather(gathered);
  }

 private:
  void fail(Moment moment) const {
    if (*fails_ == moment) {
      throw std::runtime_error("from an extension");
    }
  }
  std::shared_ptr<GatherExtension> base_;
  std::shared_ptr<Moment> fails_;
};

TEST_P(GatherExtensions, ThatFailLeaveAShardedUnit) {
  on_threads(GetParam(), [&] {
    auto model = make_model();
    auto options = in_bfloat16(GetParam());
    const auto fails = std::make_shared<Moment>(Moment::kNever);
    options.shard_placement_fn = [fails, base = options.shard_placement_fn](
                                     const at::Tensor& tensor, const std::string& name) {
      auto placement = base(tensor, name);
      if (placement) {
        placement->extension = std::make_shared<Failing>(placement->extension, fails);
      }
      return placement;
    };
    auto unit = fully_shard(*model, options);
    const auto x = torch::ones({2, 5});
    const auto expected = model->forward(x).detach();
    unit.reset_iter_state();
    for (const auto moment : {Moment::kBefore, Moment::kAfter}) {
      *fails = moment;
      EXPECT_THROW(model->forward(x), std::runtime_error);
      EXPECT_EQ(unit.unit()->state(), engine::UnitState::kSharded);
      EXPECT_EQ(unit.unit()->whole_bytes(), 0);
      *fails = Moment::kNever;
      unit.reset_iter_state();
      EXPECT_TRUE(torch::equal(model->forward(x), expected));
      unit.reset_iter_state();
    }
  });
}

} // namespace
} // namespace fsdp::testing
