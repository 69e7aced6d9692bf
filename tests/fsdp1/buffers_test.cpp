// Buffers in another dtype: which are lowered, to what, when.

#include "fsdp1/train.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

struct BufferedImpl : nn::Module {
  explicit BufferedImpl(std::shared_ptr<BufferedImpl> within = nullptr)
      : table(register_buffer("table", torch::ones({3}))), fc(register_module("fc", nn::Linear(4, 4))) {
    if (within != nullptr) {
      inner = register_module("inner", std::move(within));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return inner != nullptr ? inner->forward(fc(x)) : fc(x);
  }
  at::Tensor table;
  nn::Linear fc;
  std::shared_ptr<BufferedImpl> inner;
};
TORCH_MODULE(Buffered);

Buffered three_within_one_another() {
  const auto inner = std::make_shared<BufferedImpl>(std::make_shared<BufferedImpl>());
  return Buffered(std::make_shared<BufferedImpl>(inner));
}

FSDPOptions with_buffers_of(std::optional<c10::ScalarType> dtype) {
  FSDPOptions options;
  options.mixed_precision.buffer_dtype = dtype;
  return options;
}

std::vector<c10::ScalarType> dtypes_of(const Buffered& model) {
  return {model->table.scalar_type(), model->inner->table.scalar_type(), model->inner->inner->table.scalar_type()};
}

TEST(Buffers, GetTheDtypeOfTheNearestUnitInTheFirstForward) {
  on_threads(2, [] {
    auto layers = three_within_one_another();
    fsdp::detail::wrap_module(*layers->inner->inner, with_buffers_of(std::nullopt));
    fsdp::detail::wrap_module(*layers->inner, with_buffers_of(torch::kDouble));
    FullyShardedDataParallel<Buffered> model(layers, with_buffers_of(torch::kBFloat16));
    EXPECT_EQ(dtypes_of(model), std::vector(3, torch::kFloat));
    model(torch::ones({1, 4}));
    EXPECT_EQ(dtypes_of(model), (std::vector{torch::kBFloat16, torch::kDouble, torch::kFloat}));
    model->table.set_data(torch::ones({3}));
    model(torch::ones({1, 4}));
    EXPECT_EQ(model->table.scalar_type(), torch::kFloat) << "once";
  });
}

TEST(Buffers, ThatAreIgnoredByAUnitWithinAreLeftAlone) {
  on_threads(2, [] {
    auto layers = three_within_one_another();
    auto inner = with_buffers_of(torch::kBFloat16);
    inner.ignored_modules = {*layers->inner->inner};
    fsdp::detail::wrap_module(*layers->inner, inner);
    FullyShardedDataParallel<Buffered> model(
        layers,
        {.mixed_precision = with_buffers_of(torch::kDouble).mixed_precision,
         .ignored_states = layers->inner->inner->parameters()});
    model(torch::ones({1, 4}));
    EXPECT_EQ(dtypes_of(model), (std::vector{torch::kDouble, torch::kBFloat16, torch::kFloat}));
  });
}

TEST(Buffers, OfSeveralModulesAreLoweredAsTheInnermostUnitSays) {
  on_threads(2, [] {
    auto layers = three_within_one_another();
    layers->inner->register_buffer("shared", layers->table);
    fsdp::detail::wrap_module(*layers->inner, with_buffers_of(torch::kDouble));
    FullyShardedDataParallel<Buffered> model(layers, with_buffers_of(torch::kBFloat16));
    model(torch::ones({1, 4}));
    EXPECT_EQ(dtypes_of(model), std::vector(3, torch::kDouble));
    EXPECT_EQ(full_state_dict(model)["table"].scalar_type(), torch::kFloat);
  });
}

TEST(Buffers, ThatAreGoneAreForgotten) {
  on_threads(2, [] {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> buffer{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    {
      FullyShardedDataParallel<Buffered> model{three_within_one_another(), with_buffers_of(torch::kBFloat16)};
      buffer = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(model->table.getIntrusivePtr());
      model(torch::ones({1, 4}));
    }
    EXPECT_TRUE(buffer.expired());
  });
}

} // namespace
} // namespace fsdp::testing
