// Checkpoints that one arrangement of ranks saves and another loads.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/runs.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/system_calls.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

constexpr int kMostRanks = 4;

disk::CheckpointIndex index_of(const std::string& checkpoint) {
  const std::string path = checkpoint + "/" + disk::kIndexName;
  return disk::parse_index(disk::read_text(path, 1 << 30, disk::File::Links::kRefuse), path);
}

/// Those between which every pair is tried.
std::vector<Form> saved_forms(int ranks) {
  std::vector<Form> forms{Form::kUnsharded, Form::kRows, Form::kFlat, Form::kAligned};
  if (ranks == kMostRanks) {
    forms.push_back(Form::kHybrid);
  }
  return forms;
}

void expect_loads(const std::string& checkpoint, int ranks, const Values& values) {
  on_threads(ranks, [&] {
    for (const Form form : saved_forms(ranks)) {
      SCOPED_TRACE(std::string("into ") + name_of(form) + " on " + std::to_string(ranks) + " ranks");
      TrainingRun run = make_run(form, 0.0);
      const auto loaded = load(checkpoint, run.to_load());
      EXPECT_EQ(loaded.step, 7);
      EXPECT_EQ(loaded.path, checkpoint);
      expect_values(run, values);
    }
  });
}

class Saved : public ::testing::TestWithParam<int> {
 protected:
  std::string folder() const {
    return folder_.path().string();
  }

 private:
  detail::TemporaryFolder folder_;
};

TEST_P(Saved, GoesIntoAnyShardingOnAnyNumberOfRanks) {
  const Values values = trained_values();
  for (const Form form : saved_forms(GetParam())) {
    SCOPED_TRACE(std::string("of ") + name_of(form));
    std::string checkpoint;
    on_threads(GetParam(), [&] {
      TrainingRun run = make_run(form, values);
      const auto path = save(folder() + "/" + name_of(form), run.to_save(7), {.block_bytes = 32});
      if (rank() == 0) {
        checkpoint = path;
      }
    });
    for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
      expect_loads(checkpoint, ranks, values);
    }
  }
}

TEST_P(Saved, GoesOnWithTheSameLosses) {
  on_threads(GetParam(), [&] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      const std::string dir = folder() + "/" + name_of(form);
      TrainingRun run = make_run(form, 1000.0), other = make_run(form, 0.0);
      run.step(0);
      run.step(1);
      save(dir, run.to_save(2));
      load(dir, other.to_load());
      for (const int number : {2, 3, 4}) {
        EXPECT_EQ(run.step(number), other.step(number));
      }
      expect_values(other, values_of(run));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Saved, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

class Saves : public Saved {};

int64_t bytes_in(const disk::IndexedTensor& tensor, const std::string& file) {
  int64_t elements = 0;
  for (const auto& piece : tensor.pieces) {
    elements += file.empty() || piece.file == file ? piece.extent.numel() : 0;
  }
  return elements * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

TEST_F(Saves, AreWrittenOnceAndByAllReplicas) {
  on_threads(4, [&] {
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    torch::nn::Sequential model;
    for (int i = 0; i < 6; ++i) {
      model->push_back(torch::nn::Linear(32, 32));
    }
    fully_shard(model, options);
    const auto index = index_of(save(folder(), {.model = model}));
    int64_t all = 0;
    std::map<std::string, int64_t> of_files;
    for (const auto& [name, tensor] : index.tensors) {
      if (name.starts_with("model/")) {
        EXPECT_EQ(bytes_in(tensor, ""), tensor.numel() * 4) << name;
        all += bytes_in(tensor, "");
        for (int rank = 0; rank < 4; ++rank) {
          const std::string file = "rank-0000" + std::to_string(rank) + ".safetensors";
          of_files[file] += bytes_in(tensor, file);
        }
      }
    }
    for (const auto& [file, bytes] : of_files) {
      EXPECT_GT(bytes, all * 0.2) << file;
      EXPECT_LT(bytes, all * 0.3) << file;
    }
  });
}

TEST_F(Saves, AreWholeOfOneReplica) {
  const Values values = trained_values();
  on_threads(4, [&] {
    TrainingRun run = make_run(Form::kHybrid, values), other = make_run(Form::kHybrid, 0.0);
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}); // as the model's
    const std::string dir = folder() + "/" + std::to_string(mesh.coordinate(0));
    save(dir, run.to_save(1), {.group = mesh.group(1)});
    load(dir, other.to_load(), {.group = mesh.group(1)});
    expect_values(other, values);
  });
}

TEST_F(Saves, OfTiedWeightsAreWrittenOnce) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 1000.0);
    const auto checkpoint = save(folder(), run.to_save(1));
    const auto index = index_of(checkpoint);
    EXPECT_EQ(index.tensors.at("model/tied").pieces, index.tensors.at("model/last.bias").pieces);
    const disk::SafetensorsFile file(checkpoint + "/rank-00000.safetensors");
    EXPECT_EQ(file.tensor("model/tied").sizes, std::vector<int64_t>{3}); // of 5, on two ranks
    EXPECT_TRUE(contains(error_message([&] { file.tensor("model/last.bias"); }), "has no tensor"));
  });
}

// Of four ranks' rows, two ranks read each the half; of a flat parameter's parts no more than its rows.
TEST_F(Saves, AreReadWhereTheyAreNeeded) {
  constexpr int64_t kBlock = 64;
  for (const Form form : {Form::kRows, Form::kFlat, Form::kColumns}) {
    const std::string dir = folder() + "/" + name_of(form);
    const auto make_model = [](Form cut) {
      torch::nn::Linear model(96, 64);
      FullyShardOptions options;
      if (cut == Form::kColumns) {
        options.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) {
          return ShardPlacement{.dim = parameter.dim() - 1};
        };
      }
      fsdp::nn::make_unit({model.get()}, options, is_flat(cut) ? std::optional(fsdp::nn::FlatCut{}) : std::nullopt);
      return model;
    };
    on_threads(4, [&] { save(dir, {.model = make_model(form)}, {.block_bytes = kBlock}); });
    on_threads(2, [&] {
      auto model = make_model(Form::kRows);
      int64_t wanted = 0;
      for (const auto& shard : model->parameters()) {
        wanted += shard.numel() * 4;
      }
      count_reads_of(".safetensors");
      load(dir, {.model = model}, {.random_numbers = false});
      EXPECT_GE(bytes_read(), wanted) << name_of(form);
      const int64_t runs = form == Form::kColumns ? 32 * 4 : 2; // as many as rows, or weight and bias
      EXPECT_LE(bytes_read(), wanted + runs * 2 * kBlock) << name_of(form);
      EXPECT_LT(wanted, 64 * 97 * 4 * 0.51);
      count_reads_of("");
    });
  }
}

TEST_F(Saves, OfAnotherDtypeAreConverted) {
  on_threads(2, [&] {
    torch::nn::Linear model(5, 7), other(5, 7);
    model->to(torch::kBFloat16);
    fully_shard(model);
    fully_shard(other);
    save(folder(), {.model = model});
    load(folder(), {.model = other});
    const auto wanted = full_state_dict(model), got = full_state_dict(other);
    expect_same(got["weight"], wanted["weight"].to(torch::kFloat), "weight");
  });
}

TEST_F(Saves, OfAnotherMemoryOrderAreLoaded) {
  torch::nn::Linear model(5, 7);
  model->weight.set_data(torch::randn({5, 7}).t());
  save(folder(), {.model = model});
  on_threads(2, [&] {
    torch::nn::Linear other(5, 7);
    fully_shard(other);
    load(folder(), {.model = other});
    expect_same(full_state_dict(other)["weight"], model->weight.detach().contiguous(), "weight");
  });
}

TEST_F(Saves, HaveValuesOfTheProgram) {
  using c10::IValue;
  const double infinity = std::numeric_limits<double>::infinity();
  c10::Dict<std::string, int64_t> counts;
  counts.insert("b", 2);
  counts.insert("a", 1);
  c10::impl::GenericDict nested(c10::IntType::get(), c10::AnyType::get());
  nested.insert(3, counts);
  nested.insert(1, infinity);
  const std::map<std::string, IValue> extra{
      {"count", int64_t{1} << 62},
      {"whole", 2.0},
      {"third", 1.0 / 3},
      {"small", 5e-324},
      {"zero", -0.0},
      {"endless", -infinity},
      {"flag", true},
      {"text", "a \"text\"\n\u00e9"},
      {"none", IValue()},
      {"pair", c10::ivalue::Tuple::create(IValue(1), IValue(2.5))},
      {"numbers", std::vector<int64_t>{3, 4}},
      {"reals", std::vector<double>{0.5, infinity}},
      {"texts", std::vector<std::string>{"a", "b"}},
      {"flags", c10::List<bool>({true, false})},
      {"no_reals", std::vector<double>{}},
      {"no_texts", std::vector<std::string>{}},
      {"counts", counts},
      {"nested", nested},
      {"mixed", c10::ivalue::Tuple::create(std::vector<IValue>{IValue("a"), std::vector<int64_t>{1}})}};
  torch::nn::Linear model(2, 2);
  auto given = extra;
  given["tensor"] = torch::arange(5);
  given["nan"] = std::nan("");
  save(folder(), {.model = model, .extra = given, .step = 3});
  auto got = load(folder(), {.model = model}).extra;
  EXPECT_TRUE(got.at("tensor").toTensor().equal(torch::arange(5)));
  EXPECT_TRUE(std::isnan(got.at("nan").toDouble()));
  EXPECT_TRUE(std::signbit(got.at("zero").toDouble()));
  EXPECT_EQ(got.at("texts").to<std::vector<std::string>>(), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(got.at("flags").isBoolList());
  EXPECT_TRUE(got.at("no_reals").toDoubleVector().empty());
  EXPECT_TRUE(got.at("no_texts").to<std::vector<std::string>>().empty());
  got.erase("tensor");
  got.erase("nan");
  EXPECT_EQ(got, extra);
  const auto message = error_message([&] {
    save(folder(), {.model = model, .extra = {{"device", c10::Device(c10::kCPU)}}, .step = 4});
  });
  EXPECT_TRUE(contains(message, "'device' is, or has in it, Device: expected a number")) << message;
  EXPECT_EQ(disk::names_in(folder()), std::vector<std::string>{"step-00000003"});
}

TEST_F(Saves, SayThatTheRanksOptimizersDiffer) {
  ::testing::internal::CaptureStderr();
  on_threads(2, [&] {
    torch::nn::Linear model(4, 4);
    fully_shard(model);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.5 + rank()).momentum(0.5));
    save(folder(), {.model = model, .optimizer = &optimizer});
  });
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(said, "the ranks' optimizers differ in 'lr'")) << said;
  EXPECT_FALSE(contains(said, "'momentum'")) << said;
}

TEST_F(Saves, RefuseExtrasThatAreNoWholeTensors) {
  on_threads(2, [&] {
    torch::nn::Linear model(4, 4);
    fully_shard(model);
    const std::map<std::string, at::Tensor> wrong{
        {"is a shard, of which", model->parameters()[0]}, {"is a tensor that was never given a value", at::Tensor()}};
    for (const auto& [wanted, extra] : wrong) {
      const auto message = error_message([&, &extra = extra] {
        save(folder(), {.model = model, .extra = {{"mean", extra}}});
      });
      EXPECT_TRUE(contains(message, "extra 'mean' " + wanted)) << message;
    }
  });
  EXPECT_EQ(latest(folder()), std::nullopt);
}

TEST_F(Saves, GoOnWithTheSameRandomNumbers) {
  torch::nn::Linear model(2, 2);
  torch::rand({3});
  save(folder(), {.model = model});
  const auto wanted = torch::rand({3});
  load(folder(), {.model = model});
  EXPECT_TRUE(torch::rand({3}).equal(wanted));
  load(folder(), {.model = model}, {.random_numbers = false});
  EXPECT_FALSE(torch::rand({3}).equal(wanted));
}

TEST_F(Saves, KeepTheLast) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    EXPECT_EQ(latest(folder() + "/none"), std::nullopt);
    barrier();
    for (const int64_t step : {1, 2, 3}) {
      save(folder(), run.to_save(step), {.keep_last = 2});
    }
    barrier();
    EXPECT_EQ(latest(folder()), folder() + "/step-00000003");
    EXPECT_EQ(disk::names_in(folder()), (std::vector<std::string>{"step-00000002", "step-00000003"}));
    EXPECT_EQ(load(folder() + "/step-00000002", run.to_load()).step, 2);
  });
}

// Not a test by itself: tests/python/test_checkpoints.py begins the run, and ends it.
TEST(GoesOnFromPython, DISABLED_OnOtherRanks) {
  on_threads(3, [&] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
    fully_shard(model);
    fsdp::optim::AdamW optimizer(fsdp::parameters(model), torch::optim::AdamWOptions());
    auto loaded = load(std::getenv("FSDP_TEST_FROM"), {.model = model, .optimizer = &optimizer});
    auto losses = loaded.extra.at("losses").toDoubleList();
    for (int64_t step = loaded.step; step < loaded.step + 2; ++step) {
      const auto x = torch::arange(20.0).add(step).sin().view({4, 5});
      const auto loss = model->forward(x).pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(loss.item<double>());
    }
    save(
        std::getenv("FSDP_TEST_TO"),
        {.model = model, .optimizer = &optimizer, .extra = {{"losses", losses}}, .step = loaded.step + 2});
  });
}

} // namespace
} // namespace fsdp::testing
