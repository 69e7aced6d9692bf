// Functions take modules as programs hold them: by holder, by std::shared_ptr, or the module itself.

#include "nn/parity.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

struct TwoLayersImpl : nn::Cloneable<TwoLayersImpl> {
  TwoLayersImpl() {
    TwoLayersImpl::reset();
  }
  void reset() override {
    first = register_module("first", nn::Linear(4, 6));
    second = register_module("second", nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::relu(first(x)));
  }
  nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoLayers);

class ModuleRefs : public ::testing::TestWithParam<int> {};

/// Every function that takes a module. `model`: a holder or a pointer; `part`: its first layer.
template <typename Model, typename Part>
void use(Model model, Part part) {
  auto unit = fully_shard(part, {.reshard_after_forward = true});
  auto root = fully_shard(model);
  EXPECT_EQ(as_fsdp(part).unit(), unit.unit());
  EXPECT_EQ(as_fsdp(model).unit(), root.unit());
  EXPECT_TRUE(is_fsdp(model));
  EXPECT_EQ(describe(model).units.size(), 2u);
  EXPECT_EQ(parameters(model).size(), 4u);
  EXPECT_EQ(named_parameters(part)[0].first, "weight");
  register_fsdp_forward_method(model, "other");
  EXPECT_TRUE(is_fsdp_forward_method(model, "other"));
  call(model, torch::ones({3, 4})).sum().backward();
  to_empty(model); // nothing is on the meta device
  {
    const auto guard = summon_full_params(model, {.writeback = false});
    EXPECT_EQ(model->parameters()[0].sizes(), (std::vector<int64_t>{6, 4}));
  }
  Model copy = fsdp::clone(model), built = fsdp::clone(model, [] { return Model(std::make_shared<TwoLayersImpl>()); });
  for (Model each : {copy, built}) {
    EXPECT_TRUE(is_fsdp(each));
    ema_update_(each, model, 0.5);
    EXPECT_TRUE(torch::equal(each->forward(torch::ones({3, 4})), model->forward(torch::ones({3, 4}))));
  }
}

TEST_P(ModuleRefs, Holders) {
  on_threads(GetParam(), [] {
    TwoLayers model;
    use(model, model->first);
  });
}

TEST_P(ModuleRefs, SharedPointers) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<TwoLayersImpl>();
    use(model, model->first.ptr());
  });
}

TEST_P(ModuleRefs, OtherPointers) {
  on_threads(GetParam(), [] {
    const auto model = std::make_unique<TwoLayersImpl>();
    fully_shard({model->first.get(), model->second.get()});
    fully_shard(model, {.reshard_after_forward = true});
    TwoLayersImpl* pointer = model.get();
    EXPECT_EQ(as_fsdp(pointer).unit(), as_fsdp(model).unit());
    EXPECT_EQ(parameters(pointer).size(), 4u);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(call(pointer, torch::ones({3, 4})), call(model, torch::ones({3, 4}))));
  });
}

TEST_P(ModuleRefs, ModulesOfASequence) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 6), nn::ReLU(), nn::Linear(6, 2));
    fully_shard(model[0]);
    fully_shard(*model[2]);
    fully_shard(model);
    EXPECT_EQ(describe(model).units.size(), 2u);
  });
}

TEST_P(ModuleRefs, SeveralAsOneUnit) {
  on_threads(GetParam(), [] {
    const TwoLayers model;
    const auto both = fully_shard({model->first, model->second});
    EXPECT_EQ(as_fsdp(model->first).unit(), both.unit());
    EXPECT_EQ(as_fsdp(model->second).unit(), both.unit());
    TwoLayers other;
    const auto one = fully_shard({other->first.ptr()});
    EXPECT_EQ(as_fsdp(*other->first).unit(), one.unit());
  });
}

template <typename Nothing>
void expect_refused(Nothing nothing) {
  const std::vector<std::pair<const char*, std::function<void()>>> uses{
      {"fully_shard", [&] { fully_shard(nothing); }},
      {"fully_shard", [&] { fully_shard({nothing}); }},
      {"as_fsdp", [&] { as_fsdp(nothing); }},
      {"is_fsdp", [&] { is_fsdp(nothing); }},
      {"describe", [&] { describe(nothing); }},
      {"parameters", [&] { parameters(nothing); }},
      {"to_empty", [&] { to_empty(nothing); }},
      {"summon_full_params", [&] { static_cast<void>(summon_full_params(nothing)); }},
      {"clone", [&] { fsdp::clone(nothing); }},
      {"clone", [&] { fsdp::clone(nothing, [&] { return nothing; }); }},
      {"ema_update_", [&] { ema_update_(nothing, nothing, 0.5); }},
      {"call",
       [&] {
         call(nothing, torch::ones({1, 4}));
       }},
  };
  for (const auto& [operation, use] : uses) {
    const auto message = error_message(use);
    EXPECT_EQ(message.find("[" + std::string(operation) + "] expected a module, got an empty holder"), 0u) << message;
  }
}

TEST(EmptyModuleRefs, AreRefused) {
  on_threads(1, [] {
    expect_refused(TwoLayers{nullptr});
    expect_refused(std::shared_ptr<TwoLayersImpl>());
    expect_refused(static_cast<TwoLayersImpl*>(nullptr));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ModuleRefs, ::testing::Values(1, 2, 3));

} // namespace
} // namespace fsdp::testing
