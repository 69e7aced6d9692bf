// What a rank has of each tensor, and state dicts of that.

#include <map>

#include "layout/elements.h"
#include "state/forms.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

at::Tensor memory_of(const at::Tensor& whole) {
  return whole.as_strided({whole.numel()}, {1});
}

at::Tensor elements(const at::Tensor& whole, const Extent& extent) {
  return memory_of(whole).as_strided({extent.count, extent.run}, {extent.stride, 1}, extent.first).reshape({-1});
}

// Of the model before it was sharded.
void expect_holds(const HeldTensor& held, const at::Tensor& whole) {
  EXPECT_EQ(c10::IntArrayRef(held.sizes), whole.sizes()) << held.name;
  EXPECT_EQ(c10::IntArrayRef(held.strides), whole.strides()) << held.name;
  EXPECT_EQ(held.dtype(), whole.scalar_type());
  EXPECT_EQ(held.local.numel(), held.extent.numel()) << held.name;
  const auto local = layout::in_memory_order({held.sizes, held.strides, held.extent, held.local.detach().clone()});
  EXPECT_TRUE(local.reshape({-1}).equal(elements(whole, held.extent))) << held.name;
}

std::map<std::string, at::Tensor> values_of(OddNet& net) {
  std::map<std::string, at::Tensor> values;
  for (const auto& item : net->named_parameters()) {
    values[item.key()] = item.value().detach();
  }
  for (const auto& item : net->named_buffers()) {
    values[item.key()] = item.value();
  }
  return values;
}

class Held : public ::testing::TestWithParam<int> {};

TEST_P(Held, IsTheUnshardedModelsByNameWhateverTheCut) {
  on_threads(GetParam(), [] {
    OddNet unsharded(1000);
    const auto values = values_of(unsharded);
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      OddNet net = make(form, 1000);
      size_t count = 0;
      for (const HeldTensor& held : held(net)) {
        expect_holds(held, values.at(held.name));
        EXPECT_EQ(held.mesh.has_value(), is_sharded_in(form, held.name)) << held.name;
        ++count;
      }
      EXPECT_EQ(count, values.size() - 1) << "one is a buffer; both names of what is tied";
      for (const auto& item : sharded_state_dict(net)) {
        EXPECT_EQ(item.key(), item.value().name);
        expect_holds(item.value(), values.at(item.key()));
      }
    }
  });
}

// Each element is written once.
TEST_P(Held, HasOneFirstReplica) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      OddNet net = make(form, 1000);
      for (const HeldTensor& held : held(net)) {
        if (form != Form::kUnsharded) { // then each rank is alone
          auto written = torch::zeros({1}, torch::kLong);
          written += held.first_replica ? held.extent.numel() : 0;
          default_mesh().group()->all_reduce(written, ReduceOp::kSum, 1, {"test", ""})->wait();
          EXPECT_EQ(written.item<int64_t>(), c10::multiply_integers(held.sizes)) << held.name;
        }
      }
    }
  });
}

TEST(HeldStateDicts, NeedNoOtherRank) {
  for (const Form form : {Form::kRows, Form::kFlat}) {
    on_threads(2, [&] {
      OddNet net = make(form, 1000);
      if (rank() == 0) {
        EXPECT_EQ(sharded_state_dict(net).size(), values_of(net).size());
        for (const auto& [name, shard] : named_parameters(*net)) {
          EXPECT_TRUE(sharded_state_dict(net)[name].local.is_same(shard)) << name << ": no copies";
        }
      }
      barrier();
    });
  }
}

TEST(HeldStateDicts, SeeWhatWasWrittenToMembers) {
  on_threads(2, [] {
    OddNet net = make(Form::kRows, 1000);
    {
      torch::NoGradGuard no_grad;
      net->first->weight.fill_(3);
    }
    const auto state = sharded_state_dict(net);
    EXPECT_TRUE(state["first.weight"].local.equal(torch::full_like(state["first.weight"].local, 3)));
  });
}

TEST_P(Held, GoesIntoAModelThatIsShardedAlike) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      OddNet net = make(form, 1000), other = make(form, 0);
      const auto keys = load_state_dict(other, sharded_state_dict(net));
      EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
      const auto got = full_state_dict(other), wanted = full_state_dict(OddNet(1000));
      for (const auto& item : wanted) {
        expect_same(got[item.key()], item.value(), item.key());
      }
    }
  });
}

TEST_P(Held, GoesIntoAnyModelIfItIsWhole) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      OddNet net(1000), other = make(form, 0);
      net->turned.set_data(net->turned.contiguous()); // another memory order than the model's
      load_state_dict(other, sharded_state_dict(net));
      const auto got = full_state_dict(other), wanted = full_state_dict(OddNet(1000));
      for (const auto& item : wanted) {
        expect_same(got[item.key()], item.value(), item.key());
      }
    }
  });
}

struct ColumnImpl : torch::nn::Module {
  ColumnImpl()
      : column(register_parameter("column", torch::arange(16, torch::kFloat).view({8, 2}).select(1, 0))),
        same(register_parameter("same", torch::full({1}, 3.0).expand(6))) {}
  at::Tensor column, same;
};
TORCH_MODULE(Column);

TEST_P(Held, GoesIntoAnyModelIfItIsWholeHoweverItLies) {
  on_threads(GetParam(), [] {
    Column plain, model;
    fully_shard(*model);
    {
      const torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) {
        shard.zero_();
      }
    }
    load_state_dict(model, sharded_state_dict(plain));
    EXPECT_TRUE(sharded(model->parameters()[0]).full_tensor().equal(plain->column));
    EXPECT_TRUE(sharded(model->parameters()[1]).full_tensor().equal(plain->same));
    load_state_dict(plain, sharded_state_dict(plain)); // itself
    EXPECT_TRUE(plain->same.equal(torch::full({6}, 3.0)));
  });
}

TEST(HeldStateDicts, ThatLackElementsAreAnErrorThatWritesNothing) {
  on_threads(2, [] {
    for (const auto& [from, into] : {std::pair(Form::kRows, Form::kColumns), std::pair(Form::kFlat, Form::kRows)}) {
      OddNet net = make(from, 1000), other = make(into, 0);
      const auto message = error_message([&] { load_state_dict(other, sharded_state_dict(net)); });
      EXPECT_TRUE(contains(message, " is cut in another way")) << message;
      const auto got = full_state_dict(other), before = full_state_dict(OddNet());
      for (const auto& item : before) {
        expect_same(got[item.key()], item.value(), item.key());
      }
    }
  });
}

TEST(HeldStateDicts, OfAnotherModelAreAnError) {
  on_threads(2, [] {
    OddNet net = make(Form::kRows, 1000);
    ShardedStateDict state;
    for (const auto& item : sharded_state_dict(net)) {
      if (item.key() != "count") {
        state.insert(item.key(), item.value());
      }
    }
    state["scale"].sizes = {1};
    const auto message = error_message([&] { load_state_dict(net, state); });
    EXPECT_TRUE(contains(message, "missing: count")) << message;
    EXPECT_TRUE(contains(message, "'scale' has sizes [] in the model and [1] there")) << message;
    EXPECT_TRUE(contains(
        error_message([&] { load_state_dict(net, state, {.broadcast_from_rank0 = true}); }),
        "leave broadcast_from_rank0"));
  });
}

TEST(HeldStateDicts, ArePartlyLoadedUnlessStrict) {
  on_threads(2, [] {
    OddNet net = make(Form::kRows, 1000), other = make(Form::kRows, 0);
    ShardedStateDict state;
    state.insert("scale", sharded_state_dict(net)["scale"]);
    EXPECT_EQ(load_state_dict(other, state, {.strict = false}).missing.size(), sharded_state_dict(net).size() - 1);
    expect_same(full_state_dict(other)["scale"], OddNet(1000)->scale.detach(), "scale");
  });
}

TEST(HeldErrors, SayWhatToDo) {
  on_threads(2, [] {
    OddNet net = make(Form::kRows, 0);
    EXPECT_TRUE(contains(error_message([&] { held(net->first->weight); }), "as model->parameters() gives it"));
    const HeldTensor scale = held(net)[0];
    EXPECT_TRUE(contains(error_message([&] { like(scale, torch::zeros({5})); }), "is not cut alike"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Held, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

TEST(ShardedStateDicts, HaveWhatWasWrittenThroughMembers) {
  on_threads(2, [] {
    for (const Form form : {Form::kRows, Form::kFlat}) {
      OddNet net = make(form, 0);
      {
        const torch::NoGradGuard no_grad;
        net->first->weight.fill_(7);
      }
      EXPECT_TRUE(sharded_state_dict(net)["first.weight"].local.eq(7).all().item<bool>()) << name_of(form);
    }
  });
}

} // namespace
} // namespace fsdp::testing
