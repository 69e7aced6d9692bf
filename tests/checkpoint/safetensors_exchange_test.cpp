// Weights in files as the Hugging Face libraries have them: the same from whatever sharding, and into any.

#include <cstdlib>
#include <filesystem>

#include <sys/wait.h>
#include <unistd.h>

#include <fsdp/safetensors.h>
#include <fsdp/save.h>

#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/runs.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/system_calls.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

constexpr const char* kFile = "/model.safetensors";
constexpr const char* kWeightMap = "/model.safetensors.index.json";

std::string bytes_of_file(const std::string& path) {
  return disk::read_text(path, 1 << 30, disk::File::Links::kFollow);
}

class Exported : public ::testing::TestWithParam<int> {
 protected:
  std::string folder(const std::string& name = "exported") const {
    return folder_.path().string() + "/" + name;
  }

 private:
  detail::TemporaryFolder folder_;
};

void expect_same_model(OddNet& net, const StateDict& wanted) {
  const auto got = full_state_dict(net);
  for (const auto& item : wanted) {
    expect_same(got[item.key()], item.value(), item.key());
  }
}

TEST_P(Exported, AreTheSameBytesFromWhateverSharding) {
  export_safetensors(folder("one"), OddNet(1000));
  const std::string wanted = bytes_of_file(folder("one") + kFile);
  on_threads(GetParam(), [&] {
    for (const Form form : forms(world_size())) {
      const auto dir = folder(name_of(form));
      export_safetensors(dir, make(form, 1000));
      EXPECT_EQ(bytes_of_file(dir + kFile), wanted) << name_of(form);
      EXPECT_EQ(disk::names_in(dir).size(), 1u) << name_of(form);
    }
  });
}

TEST_P(Exported, AreImportedIntoAnySharding) {
  OddNet net(1000);
  export_safetensors(folder(), net, {.max_shard_bytes = 100});
  const auto wanted = full_state_dict(net);
  on_threads(GetParam(), [&] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      OddNet other = make(form, 0);
      const auto keys = import_safetensors(folder(), other);
      EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
      expect_same_model(other, wanted);
    }
  });
}

bool is_turned(const std::string& name) {
  return name == "first.weight" || name == "last.weight" || name == "turned";
}

TEST_P(Exported, MatricesMayLieTransposed) {
  OddNet net(1000);
  const auto wanted = full_state_dict(net);
  StateDict turned;
  for (const auto& item : wanted) {
    turned.insert(item.key(), is_turned(item.key()) ? item.value().t().contiguous() : item.value());
  }
  on_threads(GetParam(), [&] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      const auto dir = folder(name_of(form));
      export_safetensors(dir, make(form, 1000), {.transposed = is_turned});
      const disk::SafetensorsFile file(dir + kFile);
      for (const auto& tensor : file.header().tensors) {
        at::Tensor there = torch::empty(tensor.sizes, tensor.dtype);
        file.read(tensor, 0, static_cast<char*>(there.data_ptr()), tensor.bytes());
        expect_same(there, turned[tensor.name], tensor.name);
      }
      OddNet other = make(form, 0);
      import_safetensors(dir, other, {.transposed = is_turned});
      expect_same_model(other, wanted);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Exported, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

class Exchanged : public Exported {};

TEST_F(Exchanged, LargeModelsAreSpreadOverNumberedFiles) {
  OddNet net(1000);
  on_threads(2, [&] { export_safetensors(folder(), make(Form::kRows, 1000), {.max_shard_bytes = 200}); });
  const auto names = disk::names_in(folder());
  ASSERT_GT(names.size(), 3u);
  EXPECT_EQ(names.back(), kWeightMap + 1);
  size_t tensors = 0;
  for (const auto& name : names) {
    if (name != names.back()) {
      const disk::SafetensorsFile file(folder() + "/" + name);
      EXPECT_EQ(file.header().metadata.at("format"), "pt");
      EXPECT_LE(file.header().tensors.back().end, 200);
      tensors += file.header().tensors.size();
    }
  }
  EXPECT_EQ(tensors, full_state_dict(net).size() - 1) << "tied ones are there once";
}

TEST_F(Exchanged, WhatAnEarlierExportLeftIsRemoved) {
  OddNet net(1000);
  export_safetensors(folder(), net);
  disk::write_text(folder() + "/config.json", "{}");
  export_safetensors(folder(), net, {.max_shard_bytes = 300});
  const auto numbered = disk::names_in(folder());
  EXPECT_EQ(std::count(numbered.begin(), numbered.end(), kFile + 1), 0);
  export_safetensors(folder(), net);
  EXPECT_EQ(disk::names_in(folder()), (std::vector<std::string>{"config.json", kFile + 1}));
}

TEST_F(Exchanged, FilesThatAreNoExportsStay) {
  const std::vector<std::string> others{
      ".tmp-model-mine.safetensors",
      "model-00001-of-00002-ema.safetensors",
      "model-00001-of-x.safetensors",
      "model-1-of-2.safetensors",
      "model-best.safetensors",
      "model-ema.safetensors"};
  disk::make_folders(folder());
  for (const auto& name : others) {
    disk::write_text(folder() + "/" + name, "text");
  }
  for (const auto* name : {".tmp-model-00001-of-00009.safetensors", "model-00009-of-00009.safetensors"}) {
    disk::write_text(folder() + "/" + name, "text");
  }
  export_safetensors(folder(), OddNet(1000));
  auto wanted = others;
  wanted.emplace_back(kFile + 1);
  EXPECT_EQ(disk::names_in(folder()), wanted);
}

/// Whether it could be imported.
bool imports(const std::string& folder, OddNet& net) {
  try {
    import_safetensors(folder, net);
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST_F(Exchanged, ExportsAreNeverMixedWhereverTheProcessIsKilled) {
  OddNet first(1000), second(3);
  const auto old = full_state_dict(first), fresh = full_state_dict(second);
  for (const int64_t bytes_before : {200, 100'000}) {
    bool ended = false;
    int64_t point = 0;
    for (; !ended; ++point) {
      export_safetensors(folder(), first, {.max_shard_bytes = bytes_before});
      const pid_t child = fork();
      if (child == 0) {
        kill_at_point(point);
        export_safetensors(folder(), second, {.max_shard_bytes = 200});
        _exit(0);
      }
      int status = 0;
      waitpid(child, &status, 0);
      ended = WIFEXITED(status);
      OddNet net(5);
      if (imports(folder(), net)) {
        const bool is_old = full_state_dict(net)["scale"].equal(old["scale"]);
        expect_same_model(net, is_old ? old : fresh);
        EXPECT_FALSE(ended && is_old);
      } else {
        EXPECT_FALSE(ended);
      }
    }
    EXPECT_GT(point, 20);
  }
}

TEST_F(Exchanged, ErrorsLeaveNothingBehind) {
  export_safetensors(folder(), OddNet(1000));
  const std::string before = bytes_of_file(folder() + kFile);
  for (const int failing : {0, 1}) {
    on_threads(2, [&] {
      OddNet net = make(Form::kRows, 3);
      fail_from_point(rank() == failing ? 6 : -1);
      const auto message = error_message([&] { export_safetensors(folder(), net, {.max_shard_bytes = 200}); });
      fail_from_point(-1);
      EXPECT_TRUE(contains(message, "No space left on device")) << message;
      barrier();
      for (const auto& name : disk::names_in(folder())) {
        EXPECT_FALSE(name.starts_with(".tmp") && failing == 1) << name; // a disk that can do nothing removes nothing
      }
    });
    EXPECT_EQ(bytes_of_file(folder() + kFile), before);
  }
}

TEST_F(Exchanged, OneReplicaOfAHybridMeshIsEnough) {
  export_safetensors(folder("one"), OddNet(1000));
  const std::string wanted = bytes_of_file(folder("one") + kFile);
  on_threads(4, [&] {
    for (const Form form : {Form::kHybrid, Form::kHybridFlat}) {
      OddNet net = make(form, 1000);
      const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}); // as the model's
      const std::string dir = folder(name_of(form)) + std::to_string(mesh.coordinate(0));
      export_safetensors(dir, net, {.group = mesh.group(1)});
      EXPECT_EQ(bytes_of_file(dir + kFile), wanted) << dir;
    }
  });
}

TEST_F(Exchanged, RanksThatHaveNotAllElementsWriteNoFile) {
  on_threads(4, [&] {
    const auto half = init_device_mesh("cpu", {2, 2}, {"half", "rank"}).group(1);
    OddNet net = make(Form::kRows, 1000);
    const std::string dir = folder(std::to_string(rank() / 2));
    const auto message = error_message([&] { export_safetensors(dir, net, {.group = half}); });
    EXPECT_TRUE(contains(message, "these ranks have not all elements of '")) << message;
    EXPECT_FALSE(disk::exists(dir));
  });
}

TEST_F(Exchanged, ModelsThatAreNotOneWriteNoFile) {
  on_threads(4, [&] {
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    torch::nn::Linear alone(6, 6);
    fully_shard(alone, {.mesh = mesh["shard"]}); // as where replicas train on by themselves
    const auto message = error_message([&] { export_safetensors(folder(), alone); });
    EXPECT_TRUE(contains(message, "or some of them twice")) << message;
    EXPECT_FALSE(disk::exists(folder()));
    const auto dir = folder(std::to_string(mesh.coordinate(0)));
    export_safetensors(dir, alone, {.group = mesh.group(1)});
    EXPECT_TRUE(disk::exists(dir + kFile));
  });
}

/// Says what the first of two ranks does, and the other one.
class ExportedDifferently : public Exported {
 protected:
  template <typename Action>
  void expect_refusal(const Action& exported, const std::string& wanted) {
    on_threads(2, [&] {
      torch::nn::Linear model(6, 6);
      fully_shard(model);
      const auto message = error_message([&] { exported(model, /*first=*/rank() == 0); });
      EXPECT_TRUE(contains(message, wanted)) << message;
      EXPECT_FALSE(disk::exists(folder()));
    });
  }
};

TEST_F(ExportedDifferently, TensorsAreNamedAndNoFileIsWritten) {
  const auto with_another = [&](torch::nn::Linear& model, bool first) {
    if (first) {
      model->register_buffer("seen", torch::zeros({8}));
    }
    export_safetensors(folder(), model);
  };
  const auto of_another_dtype = [&](torch::nn::Linear& model, bool first) {
    model->register_buffer("seen", torch::zeros({8}, first ? torch::kDouble : torch::kFloat));
    export_safetensors(folder(), model);
  };
  const std::string seen = "the first one has 'seen' ", in_one = " in model.safetensors and rank 1 has ";
  expect_refusal(with_another, seen + "(Float, [8])" + in_one + "nothing else");
  expect_refusal(of_another_dtype, seen + "(Double, [8])" + in_one + "'seen' (Float, [8])");
}

TEST_F(ExportedDifferently, OptionsAreNamedAndNoFileIsWritten) {
  const auto under_another_name = [&](torch::nn::Linear& model, bool first) {
    const auto name = [first](const std::string& in_model) { return (first ? "one." : "other.") + in_model; };
    export_safetensors(folder(), model, {.name_in_files = name});
  };
  const auto turned = [&](torch::nn::Linear& model, bool first) {
    const auto is_turned = [first](const std::string& name) { return first && name == "weight"; };
    export_safetensors(folder(), model, {.transposed = is_turned});
  };
  const auto in_more_files = [&](torch::nn::Linear& model, bool first) {
    export_safetensors(folder(), model, {.max_shard_bytes = first ? 100 : 1000});
  };
  const std::string weight = "has 'weight' (Float, [6, 6]";
  expect_refusal(under_another_name, "rank 1 has 'other.weight' (Float, [6, 6])");
  expect_refusal(turned, weight + ", transposed) in model.safetensors and rank 1 " + weight + ") in");
  expect_refusal(in_more_files, weight + ") in model-00001-of-00002.safetensors and rank 1 " + weight + ")");
}

TEST_F(Exchanged, ViewsThatConjugateOrNegateAreResolved) {
  const auto make_model = [](bool views) {
    torch::nn::Linear model(3, 2);
    const at::Tensor complex = torch::complex(torch::ones({3}), torch::arange(3.0)), real = torch::arange(4.0);
    model->register_buffer("complex", views ? complex.conj() : complex);
    model->register_buffer("real", views ? at::_neg_view(real) : real);
    return model;
  };
  const auto model = make_model(true);
  auto other = make_model(false), third = make_model(false);
  export_safetensors(folder(), model);
  import_safetensors(folder(), other);
  save(folder("run"), {.model = model});
  load(folder("run"), {.model = third});
  for (const auto& item : model->named_buffers()) {
    const at::Tensor wanted = item.value().resolve_conj().resolve_neg();
    EXPECT_TRUE(other->named_buffers()[item.key()].equal(wanted)) << item.key();
    EXPECT_TRUE(third->named_buffers()[item.key()].equal(wanted)) << item.key();
  }
}

TEST_F(Exchanged, AFolderHasAName) {
  const auto message = error_message([&] { export_safetensors("", torch::nn::Linear(2, 2)); });
  EXPECT_TRUE(contains(message, "[export_safetensors] rank 0: [export_safetensors] expected a folder")) << message;
}

TEST_F(Exchanged, NamesMayDiffer) {
  OddNet net(1000), other;
  const auto name = [](const std::string& in_model) { return "transformer." + in_model; };
  export_safetensors(folder(), net, {.name_in_files = name});
  disk::SafetensorsFile(folder() + kFile).tensor("transformer.first.weight");
  import_safetensors(folder(), other, {.name_in_files = name});
  expect_same_model(other, full_state_dict(net));
  const auto message = error_message([&] { import_safetensors(folder(), other); });
  EXPECT_TRUE(contains(message, folder() + " is of another model. It lacks: scale, ")) << message;
  EXPECT_TRUE(contains(message, "and has besides: transformer.count, ")) << message;
  const auto one = [](const std::string&) { return std::string("one"); };
  EXPECT_TRUE(contains(
      error_message([&] { export_safetensors(folder("b"), net, {.name_in_files = one}); }), "gives 'one' to two"));
}

TEST_F(Exchanged, TheModelKeepsItsDtype) {
  torch::nn::Linear model(5, 7);
  model->to(torch::kBFloat16);
  export_safetensors(folder(), model);
  on_threads(2, [&] {
    torch::nn::Linear other(5, 7);
    fully_shard(other);
    import_safetensors(folder() + kFile, other);
    expect_same(full_state_dict(other)["weight"], model->weight.detach().to(torch::kFloat), "weight");
  });
}

TEST_F(Exchanged, EachRankReadsItsRows) {
  export_safetensors(folder(), torch::nn::Linear(64, 64));
  on_threads(4, [&] {
    torch::nn::Linear model(64, 64);
    fully_shard(model);
    count_reads_of(".safetensors");
    import_safetensors(folder(), model);
    const int64_t header = disk::SafetensorsFile(folder() + kFile).offset_of({});
    EXPECT_EQ(bytes_read(), 2 * header + 16 * 65 * 4);
    count_reads_of("");
  });
}

TEST_F(Exchanged, EachRankReadsItsColumnsOfWhatLiesTransposed) {
  const auto weight = [](const std::string& name) { return name == "weight"; };
  export_safetensors(folder(), torch::nn::Linear(32, 64), {.transposed = weight});
  on_threads(4, [&] {
    torch::nn::Linear model(32, 64);
    fully_shard(model);
    count_reads_of(".safetensors");
    import_safetensors(folder(), model, {.transposed = weight});
    const int64_t header = disk::SafetensorsFile(folder() + kFile).offset_of({});
    EXPECT_EQ(bytes_read(), 2 * header + 16 * 33 * 4);
    count_reads_of("");
  });
}

TEST_F(Exchanged, OnlyMatricesLieTransposed) {
  torch::nn::Linear model(4, 3);
  const auto bias = [](const std::string& name) { return name == "bias"; };
  const auto weight = [](const std::string& name) { return name == "weight"; };
  export_safetensors(folder(), model);
  const auto import_with = [&](const TransposedInFiles& transposed) {
    return error_message([&] { import_safetensors(folder(), model, {.transposed = transposed}); });
  };
  EXPECT_TRUE(contains(import_with(bias), "'bias' has sizes [3], and only a matrix can be transposed"));
  EXPECT_TRUE(contains(import_with(weight), "'weight' has sizes [4, 3] there and [3, 4] in the model"));
  EXPECT_TRUE(contains(
      error_message([&] { export_safetensors(folder(), model, {.transposed = bias}); }),
      "'bias' has sizes [3], and only"));
}

TEST_F(Exchanged, NothingChangesIfThereIsAnError) {
  export_safetensors(folder(), OddNet(1000), {.max_shard_bytes = 200});
  const std::string map = bytes_of_file(folder() + kWeightMap);
  const auto complaint = [&] {
    std::string complaint;
    on_threads(2, [&] {
      OddNet net = make(Form::kRows, 5);
      const auto message = error_message([&] { import_safetensors(folder(), net); });
      expect_same_model(net, full_state_dict(OddNet(5)));
      if (rank() == 0) {
        complaint = message;
      }
    });
    return complaint;
  };
  const auto write_map = [&](const std::string& text) {
    std::filesystem::remove(folder() + kWeightMap);
    disk::write_text(folder() + kWeightMap, text);
  };
  const auto with_map = [&](const std::string& from, const std::string& to) {
    std::string changed = map;
    write_map(changed.replace(changed.find(from), from.size(), to));
    return complaint();
  };
  EXPECT_TRUE(contains(with_map("model-00001", "../model-00001"), "in what is no file's name"));
  EXPECT_TRUE(contains(with_map("model-00001-of", "model-00009-of"), "/model-00009-of"));
  EXPECT_TRUE(contains(with_map("\"first.weight\"", "\"second.weight\""), " has no tensor 'second.weight'"));
  write_map(map);
  const std::string last = folder() + "/" + disk::names_in(folder())[1];
  std::filesystem::resize_file(last, std::filesystem::file_size(last) - 1);
  EXPECT_TRUE(contains(complaint(), last));
  std::filesystem::remove(folder() + kWeightMap);
  EXPECT_TRUE(contains(complaint(), kWeightMap));
}

TEST_F(Exchanged, SizesThatDifferAreNamed) {
  export_safetensors(folder(), torch::nn::Linear(4, 3));
  torch::nn::Linear other(5, 3);
  const auto message = error_message([&] { import_safetensors(folder(), other); });
  EXPECT_TRUE(contains(message, folder() + ": 'weight' has sizes [3, 4] there and [3, 5] in the model")) << message;
}

// Not a test by itself: tests/python/test_safetensors.py compares what comes out with what it has written.
TEST(ExchangeWithPython, DISABLED_GoesThroughAShardedModel) {
  on_threads(3, [&] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::LayerNorm(std::vector<int64_t>{7}));
    fully_shard(model);
    import_safetensors(std::getenv("FSDP_TEST_FROM"), model);
    export_safetensors(std::getenv("FSDP_TEST_TO"), model, {.max_shard_bytes = 150});
  });
}

} // namespace
} // namespace fsdp::testing
