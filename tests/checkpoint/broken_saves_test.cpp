// Checkpoints that cannot be written, or cannot be loaded: an error that names file and tensor, on all ranks, and
// nothing is lost.

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include <sys/wait.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/runs.h"
#include "checkpoint/system_calls.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

class BrokenSaves : public ::testing::Test {
 protected:
  std::string folder() const {
    return folder_.path().string();
  }

 private:
  detail::TemporaryFolder folder_;
};

std::string index_text(const std::string& checkpoint) {
  return disk::read_text(checkpoint + "/" + disk::kIndexName, 1 << 30, disk::File::Links::kRefuse);
}

void write_index(const std::string& checkpoint, const std::string& text) {
  std::filesystem::remove(checkpoint + "/" + disk::kIndexName);
  disk::write_text(checkpoint + "/" + disk::kIndexName, text);
}

// Of one rank, without a job.
TEST_F(BrokenSaves, LeaveTheOneBeforeWhereverTheProcessIsKilled) {
  expect_whole_wherever_it_is_killed(folder(), [&](TrainingRun& second) { save(folder(), second.to_save(2)); });
}

TEST_F(BrokenSaves, AreErrorsOnAllRanksWhereOneHasAFullDisk) {
  const Values values = trained_values();
  std::atomic<bool> written = false;
  on_threads(3, [&] {
    TrainingRun run = make_run(Form::kRows, values);
    save(folder(), run.to_save(1));
  });
  for (int64_t point = 0; !written; ++point) {
    on_threads(3, [&] {
      TrainingRun run = make_run(Form::kFlat, 0.0);
      if (rank() == 1) {
        fail_from_point(point);
      }
      std::string message;
      try {
        save(folder(), run.to_save(2));
        written = true;
      } catch (const Error& error) {
        message = error.what();
      }
      fail_from_point(-1);
      barrier();
      EXPECT_TRUE(written || contains(message, "[save] rank 1: [checkpoint] could not")) << message;
      EXPECT_TRUE(written || contains(message, "No space left on device; make room")) << message;
      if (!written) {
        EXPECT_EQ(disk::names_in(folder()), std::vector<std::string>{"step-00000001"});
        EXPECT_EQ(load(folder(), run.to_load()).step, 1);
        expect_values(run, values);
      }
    });
  }
}

TEST_F(BrokenSaves, AreErrorsWhereAFolderCannotBeWritten) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    const auto message = error_message([&] { save("/proc/self/inner", run.to_save(1)); });
    EXPECT_TRUE(contains(message, "[save] rank 0: [checkpoint] could not make the folder /proc/self/inner")) << message;
    EXPECT_TRUE(contains(error_message([&] { save(folder(), run.to_save(-1)); }), "a step of 0 or more, got -1"));
    EXPECT_TRUE(contains(error_message([&] { save(folder(), run.to_save(1), {.block_bytes = 8}); }), "got 8"));
    EXPECT_TRUE(contains(error_message([&] { save("", run.to_save(1)); }), "[save] expected a folder"));
  });
}

TEST_F(BrokenSaves, AreErrorsWhereRanksDisagree) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    const auto message = error_message([&] { save(folder(), run.to_save(1), {.block_bytes = rank() == 0 ? 32 : 64}); });
    EXPECT_TRUE(contains(message, "block_bytes is 32 on one rank and 64 on another")) << message;
    barrier();
    EXPECT_TRUE(disk::names_in(folder()).empty());
  });
}

/// What all of two ranks say of a checkpoint that was changed, whose values are not taken over.
std::string complaint(const std::string& dir, const std::function<void(TrainingRun&)>& change_model = nullptr) {
  std::string complaint;
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 5.0);
    if (change_model) {
      change_model(run);
    }
    const auto before = values_of(run);
    const auto message = error_message([&] { load(dir, run.to_load()); });
    expect_values(run, before);
    const auto all = world()->exchange(message, {"test", ""});
    EXPECT_EQ(all[0], all[1]);
    if (rank() == 0) {
      complaint = message;
    }
  });
  return complaint;
}

class Damaged : public BrokenSaves {
 protected:
  Damaged() {
    on_threads(2, [&] {
      TrainingRun run = make_run(Form::kRows, trained_);
      const auto path = save(folder(), run.to_save(1), {.block_bytes = 32});
      if (rank() == 0) {
        checkpoint_ = path;
      }
    });
  }
  std::string file(int rank) const {
    return checkpoint_ + "/rank-0000" + std::to_string(rank) + ".safetensors";
  }
  void change_index(const std::string& from, const std::string& to) const {
    std::string json = disk::without_checksum(index_text(checkpoint_), "index");
    const auto place = json.find(from);
    ASSERT_NE(place, std::string::npos) << from;
    json.replace(place, from.size(), to);
    write_index(disk::with_checksum(json));
  }
  void write_index(const std::string& text) const {
    testing::write_index(checkpoint_, text);
  }

  Values trained_ = trained_values();
  std::string checkpoint_;
};

TEST_F(Damaged, FilesThatLackAreNamed) {
  std::filesystem::remove(file(1));
  const auto message = complaint(folder());
  EXPECT_TRUE(contains(message, file(1) + ": No such file")) << message;
  EXPECT_TRUE(contains(message, "'model/first.bias' cannot be read")) << message;
}

TEST_F(Damaged, FilesThatAreCutShortAreNamed) {
  std::filesystem::resize_file(file(1), std::filesystem::file_size(file(1)) - 1);
  const auto message = complaint(folder());
  EXPECT_TRUE(contains(message, file(1) + ": '")) << message;
  EXPECT_TRUE(contains(message, "it is cut short")) << message;
}

TEST_F(Damaged, FilesThatAreLinksAreRefused) {
  std::filesystem::rename(file(1), folder() + "/other");
  std::filesystem::create_symlink(folder() + "/other", file(1));
  EXPECT_TRUE(contains(complaint(folder()), file(1) + " is a link"));
}

TEST_F(Damaged, BitsThatAreFlippedAreNoticed) {
  const auto index = disk::parse_index(index_text(checkpoint_), "index");
  int count = 0;
  for (const auto& [name, tensor] : index.tensors) {
    if (name == "model/tied" || name.starts_with("random/")) {
      continue;
    }
    for (const auto& piece : tensor.pieces) {
      const auto last = piece.offset + piece.extent.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype)) - 1;
      std::fstream stream(checkpoint_ + "/" + piece.file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(last);
      const int byte = stream.get();
      stream.seekp(last);
      stream.put(static_cast<char>(byte ^ 4));
      stream.flush();
      const auto message = complaint(folder());
      EXPECT_TRUE(contains(message, piece.file + ": '" + name + "' is damaged")) << message;
      stream.seekp(last);
      stream.put(static_cast<char>(byte));
      ++count;
    }
  }
  EXPECT_GT(count, 20);
}

TEST_F(Damaged, OtherModelsAreNamed) {
  auto message = complaint(folder(), [](TrainingRun& run) { run.net->register_buffer("more", torch::zeros({1})); });
  EXPECT_TRUE(contains(message, checkpoint_ + " is of another model. It lacks: more; and has besides: .")) << message;
  message = complaint(folder(), [](TrainingRun& run) { run.net->count.set_data(torch::zeros({3})); });
  EXPECT_TRUE(contains(message, checkpoint_ + ": 'model/count' has sizes [2] there and [3] in the model")) << message;
  message = complaint(folder(), [](TrainingRun& run) {
    run.optimizer = std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{parameters(*run.net)[0]});
  });
  EXPECT_TRUE(contains(message, "the state is another optimizer's, and none was taken")) << message;
}

TEST_F(Damaged, FoldersWithoutACheckpointAreNamed) {
  EXPECT_TRUE(contains(complaint(folder() + "/none"), folder() + "/none has no checkpoint"));
  std::filesystem::remove(checkpoint_ + "/" + disk::kIndexName);
  EXPECT_TRUE(contains(complaint(folder()), "has no checkpoint"));
}

TEST_F(Damaged, ThatWereSavedWithoutAnOptimizerHaveNone) {
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  save(folder() + "/model", {.model = model});
  const auto message = error_message([&] { load(folder() + "/model", {.model = model, .optimizer = &optimizer}); });
  EXPECT_TRUE(contains(message, "step-00000000 was saved without an optimizer")) << message;
}

TEST_F(Damaged, IndicesThatAreHostileAreRefused) {
  struct Change {
    std::string from, to, complaint;
  };
  const std::string good = index_text(checkpoint_);
  const std::vector<Change> changes{
      {"\"version\":1", "\"version\":2", "is of version 2, and this libfsdp reads 1"},
      {"\"libfsdp checkpoint\"", "\"other\"", "is of another format"},
      {"rank-00000.safetensors", "../rank-00000.safetensors", "is in '../rank-00000.safetensors', which is no file's"},
      {"rank-00000.safetensors", "/etc/passwd", "is in '/etc/passwd'"},
      {"rank-00000.safetensors", "..", "is in '..'"},
      {"\"offset\":", "\"offset\":-", "has something else than a number from 0"},
      {"\"offset\":", "\"offset\":9999999", "it is cut short"},
      {"\"strides\":[", "\"strides\":[1,", "has strides that leave gaps"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F33\"", "has a dtype that LibTorch does not have"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"F64\"", "'model/count' is damaged"},
      {"\"crc32c\":\"", "\"crc32c\":\"x", "has a crc32c that is none"},
      {"\"crc32c\":\"", "\"crc32c\":\"00000000", "has another number of checksums than blocks"},
      {"\"extent\":[", "\"extent\":[1000", "has elements that the tensor does not have"},
      {"\"extent\":[", "\"extent\":[1,", "has an extent that is none"},
      {"\"block_bytes\":32", "\"block_bytes\":0", "has a block_bytes out of range"},
      {"\"pieces\":[", "\"pieces\":[1,", "a piece of"},
      {"{\"tuple\":[0.9,0.999]}", "{\"tuple\":[0.9]}", "group 0: 'betas' is of another kind"},
      {"{\"tuple\":[0.9,0.999]}", "0.9", "group 0: 'betas' is of another kind"},
      {"\"lr\":0.02", "\"lr\":\"0.02\"", "group 0: 'lr' is of another kind"},
      {"{\"step\":2}", "{\"step\":\"2\"}", "is no number of this optimizer's"},
      {"{\"step\":2}", "{\"step\":1e300}", "is no number of this optimizer's"},
      {"{\"step\":2}", "{}", "is missing"},
      {"\"tensors\"", "\"tensors", "is no JSON"},
  };
  for (const auto& [from, to, wanted] : changes) {
    change_index(from, to);
    const auto message = complaint(folder());
    EXPECT_TRUE(contains(message, wanted)) << from << " " << to;
    EXPECT_TRUE(contains(message, checkpoint_)) << message;
    write_index(good);
  }
}

// The first of two pieces, twice: elements would come from nowhere.
TEST_F(Damaged, PiecesThatOverlapAreNoticed) {
  auto index = disk::parse_index(index_text(checkpoint_), "index");
  auto& pieces = index.tensors.at("model/first.weight").pieces;
  ASSERT_EQ(pieces.size(), 2u);
  pieces[1] = pieces[0];
  write_index(disk::to_text(index));
  EXPECT_TRUE(contains(complaint(folder()), "lacks elements of 'model/first.weight', or has some twice"));
}

TEST_F(Damaged, BitsOfTheIndexThatAreFlippedAreNoticed) {
  const std::string good = index_text(checkpoint_);
  for (size_t i = 0; i < good.size(); i += 7) {
    std::string changed = good;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    const auto message = error_message([&] { disk::parse_index(changed, checkpoint_); });
    EXPECT_TRUE(contains(message, checkpoint_) && contains(message, "is damaged")) << i << ": " << message;
  }
}

TEST_F(Damaged, StatesThatLackATensorAreNamed) {
  auto index = disk::parse_index(index_text(checkpoint_), "index");
  ASSERT_EQ(index.tensors.erase("optimizer/first.weight/exp_avg"), 1u);
  write_index(disk::to_text(index));
  EXPECT_TRUE(contains(complaint(folder()), "'exp_avg' of 'first.weight' is missing"));
}

// Before anything is taken over.
TEST_F(Damaged, RandomNumbersOfAnotherGeneratorAreRefused) {
  auto index = disk::parse_index(index_text(checkpoint_), "index");
  index.tensors.at("random/1/cpu") = index.tensors.at("model/first.weight");
  write_index(disk::to_text(index));
  const auto message = complaint(folder());
  EXPECT_TRUE(contains(message, "rank 1: ")) << message;
  EXPECT_TRUE(contains(message, "no state of this LibTorch's 'cpu' generator")) << message;
}

// A list of its elements would not fit into any memory.
TEST_F(BrokenSaves, FilesAreLookedAtBeforeMemoryIsAskedFor) {
  constexpr int64_t kBlock = int64_t{1} << 30, kHalf = int64_t{1} << 41;
  torch::nn::Linear model(2, 2);
  const std::string path = save(folder(), {.model = model}, {.block_bytes = kBlock});
  auto index = disk::parse_index(index_text(path), path);
  const std::string file = index.tensors.at("model/weight").pieces[0].file;
  const std::vector<uint32_t> checksums(kHalf / kBlock);
  index.tensors["extra/huge"] = {
      at::kByte, {2 * kHalf}, {1}, {{file, 0, {0, 1, 2, kHalf}, checksums}, {file, 0, {1, 1, 2, kHalf}, checksums}}};
  write_index(path, disk::to_text(index));
  const auto message = error_message([&] { load(path, {.model = model}); });
  EXPECT_TRUE(contains(message, "'extra/huge' has bytes up to")) << message;
}

TEST_F(Damaged, IndicesWithLettersChangedDoNoHarm) {
  const std::string good = disk::without_checksum(index_text(checkpoint_), "index");
  std::mt19937 random(1); // NOLINT: the same each time
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string changed = good;
    for (size_t n = random() % 3 + 1; n > 0; --n) {
      changed[random() % changed.size()] = "{}[]\",:0129.-eFn\\ \xc3"[random() % 20];
    }
    try {
      disk::parse_index(disk::with_checksum(changed), "index");
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

} // namespace
} // namespace fsdp::testing
