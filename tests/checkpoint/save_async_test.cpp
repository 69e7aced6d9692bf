// Checkpoints that are written while training goes on.

#include <chrono>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include <fsdp/save_async.h>

#include "base/caller.h"
#include "checkpoint/folder.h"
#include "checkpoint/runs.h"
#include "checkpoint/system_calls.h"
#include "support/end_of_child.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

using namespace std::chrono_literals;
using Names = std::vector<std::string>;

/// What is held goes on, whatever becomes of the test.
class HeldFlush {
 public:
  explicit HeldFlush(const std::string& ending) {
    hold_flush(ending);
  }
  HeldFlush(const HeldFlush&) = delete;
  HeldFlush& operator=(const HeldFlush&) = delete;
  ~HeldFlush() {
    release();
  }
  static void release() {
    hold_flush("");
  }
};

class AsyncSaves : public ::testing::TestWithParam<int> {
 protected:
  std::string folder() const {
    return (folder_.path() / "runs").string();
  }
  void remove_all() const {
    barrier();
    if (rank() == 0) {
      disk::remove_folder_tree(folder());
    }
    barrier();
  }
  void expect_saved(int64_t step, const Values& values) const {
    TrainingRun run = make_run(Form::kUnsharded, 5.0);
    EXPECT_EQ(load(folder(), run.to_load()).step, step);
    expect_values(run, values);
  }

 private:
  detail::TemporaryFolder folder_;
};

TEST_P(AsyncSaves, HaveWhatWasThereAtTheCall) {
  for (const int64_t most : {int64_t{0}, int64_t{300}, SaveOptions{}.max_staged_bytes}) {
    on_threads(GetParam(), [&] {
      for (const Form form : forms(world_size())) {
        SCOPED_TRACE(std::string(name_of(form)) + ", staged: " + std::to_string(most));
        const std::string dir = folder() + "/" + name_of(form) + std::to_string(most);
        TrainingRun run = make_run(form, 1000.0), other = make_run(form, 0.0);
        run.step(0);
        run.step(1);
        const Values values = values_of(run);
        auto save = save_async(dir, run.to_save(2), {.block_bytes = 32, .max_staged_bytes = most});
        std::vector<float> losses;
        for (const int number : {2, 3, 4}) {
          losses.push_back(run.step(number));
        }
        EXPECT_EQ(save.wait(), dir + "/step-00000002");
        EXPECT_EQ(save.wait(), dir + "/step-00000002") << "as often as one likes";
        EXPECT_TRUE(save.done());
        load(dir, other.to_load());
        expect_values(other, values);
        for (size_t i = 0; i < losses.size(); ++i) {
          EXPECT_EQ(other.step(static_cast<int>(i) + 2), losses[i]);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AsyncSaves, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

class AsyncSave : public AsyncSaves {};

TEST_F(AsyncSave, OfValuesOfTheProgramHasThemAsTheyWere) {
  torch::nn::Linear model(2, 2);
  c10::List<int64_t> numbers({1, 2});
  auto tensor = torch::arange(4);
  auto save = save_async(folder(), {.model = model, .extra = {{"numbers", numbers}, {"tensor", tensor}}});
  numbers.push_back(3);
  tensor.fill_(7);
  save.wait();
  const auto extra = load(folder(), {.model = model}).extra;
  EXPECT_EQ(extra.at("numbers").toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(extra.at("tensor").toTensor().equal(torch::arange(4)));
}

TEST_F(AsyncSave, AppearsWhenAllHaveWrittenWhetherOrNotAnybodyWaits) {
  const Values values = trained_values();
  const HeldFlush held("rank-00001.safetensors");
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, values);
    auto save = save_async(folder(), run.to_save(2));
    barrier();
    EXPECT_EQ(latest(folder()), std::nullopt);
    EXPECT_FALSE(save.done());
    barrier();
    if (rank() == 0) {
      HeldFlush::release();
    }
    while (!latest(folder())) {
      std::this_thread::sleep_for(1ms);
    }
    barrier();
    EXPECT_EQ(save.wait(), folder() + "/step-00000002");
  });
  expect_saved(2, values);
}

TEST_F(AsyncSave, ThatFailsIsAnErrorOnAllRanksThatWait) {
  const Values values = trained_values();
  for (const int failing : {0, 1, 2}) {
    on_threads(3, [&] {
      TrainingRun run = make_run(Form::kRows, values), other = make_run(Form::kRows, 0.0);
      save(folder(), run.to_save(1));
      fail_to_flush("rank-0000" + std::to_string(failing) + ".safetensors");
      auto pending = save_async(folder(), other.to_save(2));
      for (int again = 0; again < 2; ++again) {
        const auto message = error_message([&] { pending.wait(); });
        EXPECT_TRUE(contains(message, "[save] rank " + std::to_string(failing) + ": [checkpoint] could not"))
            << message;
        EXPECT_TRUE(contains(message, "No space left on device; make room")) << message;
      }
      EXPECT_TRUE(pending.done());
      barrier();
      fail_to_flush("");
      EXPECT_EQ(disk::names_in(folder()), Names{"step-00000001"});
      barrier();
      EXPECT_EQ(save_async(folder(), run.to_save(3), {.keep_last = 1}).wait(), folder() + "/step-00000003");
    });
    disk::remove_folder_tree(folder());
  }
}

TEST_F(AsyncSave, ThatCannotBeginIsAnErrorAtTheCall) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    const auto message = error_message([&] { save_async("/proc/self/inner", run.to_save(1)); });
    EXPECT_TRUE(contains(message, "[save_async] rank 0: [checkpoint] could not make the folder")) << message;
    const auto negative = error_message([&] { save_async(folder(), run.to_save(1), {.max_staged_bytes = -1}); });
    EXPECT_TRUE(contains(negative, "max_staged_bytes of 0 or more, got -1")) << negative;
  });
}

// Which otherwise would take its half-written folder for one that an interrupted run has left.
TEST_F(AsyncSave, IsWaitedForByTheNextSaveAndLoad) {
  const Values values = trained_values();
  on_threads(3, [&] {
    TrainingRun run = make_run(Form::kRows, values), other = make_run(Form::kFlat, 0.0);
    const auto goes_on_later = [&](const std::function<void()>& next) {
      barrier();
      if (rank() == 0) {
        hold_flush("rank-00002.safetensors");
      }
      barrier();
      auto pending = save_async(folder(), other.to_save(2));
      std::thread later([&] {
        std::this_thread::sleep_for(30ms);
        HeldFlush::release();
      });
      next();
      later.join();
      EXPECT_TRUE(pending.done());
      EXPECT_EQ(pending.wait(), folder() + "/step-00000002");
    };
    goes_on_later([&] { save_async(folder(), run.to_save(3)).wait(); });
    EXPECT_EQ(disk::names_in(folder()), (Names{"step-00000002", "step-00000003"}));
    remove_all();
    goes_on_later([&] { save(folder(), run.to_save(4)); });
    EXPECT_EQ(disk::names_in(folder()), (Names{"step-00000002", "step-00000004"}));
    remove_all();
    goes_on_later([&] { EXPECT_EQ(load(folder(), run.to_load()).step, 2); });
  });
}

TEST_F(AsyncSave, IsWrittenWhereItsRanksLetGoOfItAtDifferentTimes) {
  const Values values = trained_values();
  on_threads(3, [&] {
    TrainingRun run = make_run(Form::kRows, values);
    std::optional<PendingSave> save;
    for (const int64_t step : {1, 2, 3}) {
      save.emplace(save_async(folder(), run.to_save(step), {.keep_last = 2}));
      if (rank() == static_cast<int>(step) - 1) {
        save.reset();
      }
    }
  });
  EXPECT_EQ(disk::names_in(folder()), (Names{"step-00000002", "step-00000003"}));
  expect_saved(3, values);
}

TEST_F(AsyncSave, ThatNobodyWaitsForWarnsOfItsError) {
  ::testing::internal::CaptureStderr();
  {
    torch::nn::Linear model(2, 2);
    fail_to_flush("rank-00000.safetensors");
    save_async(folder(), {.model = model});
  }
  fail_to_flush("");
  const auto text = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(text, "could not be written, and nobody has waited for it")) << text;
}

// Longer than a rank that has written waits for the others' word.
TEST_F(AsyncSave, MayTakeLongerThanTheTimeout) {
  const HeldFlush held("rank-00001.safetensors");
  on_threads(
      3,
      [&] {
        TrainingRun run = make_run(Form::kRows, 0.0);
        auto save = save_async(folder(), run.to_save(2));
        std::thread later([first = rank() == 0] {
          if (first) {
            std::this_thread::sleep_for(14s);
            HeldFlush::release();
          }
        });
        EXPECT_EQ(save.wait(), folder() + "/step-00000002");
        later.join();
      },
      12s);
}

TEST_F(AsyncSave, LeavesTheOneBeforeWhereverTheProcessIsKilled) {
  expect_whole_wherever_it_is_killed(
      folder(), [&](TrainingRun& second) { save_async(folder(), second.to_save(2)).wait(); });
}

TEST_F(AsyncSave, IsLeftToItsOwnProcessByAFork) {
  const HeldFlush held("rank-00001.safetensors");
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    std::optional<PendingSave> save(save_async(folder(), run.to_save(2)));
    barrier();
    std::this_thread::sleep_for(50ms); // the first rank waits for the other
    if (rank() == 0) {
      EXPECT_EQ(end_of_child([&] { save.reset(); }).status, 0);
      EXPECT_FALSE(save->done());
      HeldFlush::release();
    }
    EXPECT_EQ(save->wait(), folder() + "/step-00000002");
  });
}

TEST_F(AsyncSave, IsWrittenBeforeTheProcessExits) {
  torch::nn::Linear model(2, 2);
  const auto end = end_of_child([&] {
    hold_flush("rank-00000.safetensors");
    new PendingSave(save_async(folder(), {.model = model, .step = 3})); // NOLINT: nobody lets go of it
    std::thread([] {
      std::this_thread::sleep_for(100ms);
      HeldFlush::release();
    }).detach();
    std::exit(0);
  });
  EXPECT_EQ(end.status, 0) << end.said;
  EXPECT_EQ(latest(folder()), folder() + "/step-00000003");
}

TEST_F(AsyncSave, CanBeWaitedForAfterShutdown) {
  on_processes(2, [] {
    const std::string folder = (process_folder() / "runs").string();
    init();
    torch::nn::Linear model(2, 2);
    fully_shard(*model);
    auto save = save_async(folder, {.model = model, .step = 3});
    shutdown();
    EXPECT_EQ(save.wait(), folder + "/step-00000003");
  });
}

// Or a full disk would stay full.
TEST_F(AsyncSave, ThatFailsHasNoFileOpen) {
  torch::nn::Linear model(2, 2);
  fail_to_flush("rank-00000.safetensors");
  auto save = save_async(folder(), {.model = model});
  EXPECT_TRUE(contains(error_message([&] { save.wait(); }), "No space left on device"));
  fail_to_flush("");
  for (const auto& name : disk::names_in("/proc/self/fd")) {
    char path[PATH_MAX] = "";
    if (readlink(("/proc/self/fd/" + name).c_str(), path, sizeof(path) - 1) > 0) {
      EXPECT_FALSE(contains(path, folder())) << path;
    }
  }
}

// Which do not know that they are the same ranks.
TEST_F(AsyncSave, OfAnotherGroupIntoTheSameFolderIsRefused) {
  torch::nn::Linear model(2, 2);
  const auto one = group_of_one(), another = group_of_one();
  const HeldFlush held("rank-00000.safetensors");
  auto pending = save_async(folder(), {.model = model, .step = 1}, {.group = one});
  for (const std::function<void()>& next : std::vector<std::function<void()>>{
           [&] { save(folder() + "/.", {.model = model, .step = 1}, {.group = another}); },
           [&] { save_async(folder(), {.model = model, .step = 2}, {.group = another}); },
           [&] { load(folder(), {.model = model}, {.group = another}); }}) {
    const auto message = error_message(next);
    EXPECT_TRUE(contains(message, "is being written into by save_async, for another group")) << message;
  }
  HeldFlush::release();
  EXPECT_EQ(pending.wait(), folder() + "/step-00000001");
  EXPECT_EQ(save(folder(), {.model = model, .step = 2}, {.group = another}), folder() + "/step-00000002");
}

// The first rank, which makes the folder, does not know of it.
TEST_F(AsyncSave, OfSomeRanksIsLeftAloneByASaveOfAllThatIsRefused) {
  on_processes(2, [] {
    const std::string folder = (process_folder() / "runs").string();
    init();
    torch::nn::Linear model(2, 2);
    std::optional<PendingSave> pending;
    const HeldFlush held("rank-00000.safetensors");
    if (rank() == 1) {
      pending = save_async(folder, {.model = model, .step = 1}, {.group = group_of_one()});
    }
    const auto message = error_message([&] { save(folder, {.model = model, .step = 2}); });
    EXPECT_TRUE(contains(message, "is being written into by save_async, for another group")) << message;
    HeldFlush::release();
    if (rank() == 1) {
      EXPECT_EQ(pending->wait(), folder + "/step-00000001");
      EXPECT_EQ(latest(folder), folder + "/step-00000001");
    }
    shutdown();
  });
}

TEST_F(AsyncSave, IsWrittenWhereItsFolderWasAtTheCall) {
  torch::nn::Linear model(2, 2);
  disk::make_folders(folder() + "/other");
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder());
  auto save = save_async("a", {.model = model});
  std::filesystem::current_path(folder() + "/other");
  EXPECT_EQ(save.wait(), folder() + "/a/step-00000000");
  EXPECT_EQ(latest(folder() + "/a"), folder() + "/a/step-00000000");
  std::filesystem::current_path(before);
}

TEST_F(AsyncSave, OfARankWhoseDirectoryIsGoneIsAnErrorOnAllRanks) {
  on_processes(2, [] {
    init({.backend = "shm"});
    const auto gone = process_folder() / ("of-rank-" + std::to_string(rank()));
    const auto stays = process_folder() / "stays";
    disk::make_folders(gone);
    disk::make_folders(stays);
    std::filesystem::current_path(rank() == 1 ? gone : stays);
    std::filesystem::remove(gone);
    torch::nn::Linear model(2, 2);
    fully_shard(*model);
    auto pending = save_async("a", {.model = model});
    const auto message = error_message([&] { pending.wait(); });
    EXPECT_TRUE(contains(message, "[save] rank 1: [checkpoint] could not")) << message;
    EXPECT_TRUE(contains(message, "No such file or directory")) << message;
    shutdown();
  });
}

// As the system reads it, and so `save` and `latest`.
TEST_F(AsyncSave, IsWrittenWhereItsPathLeadsThroughLinks) {
  torch::nn::Linear model(2, 2);
  disk::make_folders(folder() + "/far/away");
  disk::make_folders(folder() + "/here");
  std::filesystem::create_directory_symlink(folder() + "/far/away", folder() + "/here/link");
  save_async(folder() + "/here/link/../runs", {.model = model, .step = 7}).wait();
  EXPECT_TRUE(disk::is_folder(folder() + "/far/runs/step-00000007"));
  EXPECT_FALSE(disk::exists(folder() + "/here/runs"));
}

// What the failed one says of itself comes into its own folder.
TEST_F(AsyncSave, ThatFailsSlowlyLeavesTheSameStepToTheNext) {
  on_threads(2, [&] {
    TrainingRun run = make_run(Form::kRows, 0.0);
    fail_to_flush("rank-00001.safetensors");
    hold_flush("rank-00001.failed");
    barrier();
    auto failed = save_async(folder(), run.to_save(2));
    std::thread later([] {
      std::this_thread::sleep_for(1500ms);
      HeldFlush::release();
    });
    EXPECT_TRUE(contains(error_message([&] { failed.wait(); }), "[save] rank 1: "));
    barrier();
    fail_to_flush("");
    EXPECT_EQ(save_async(folder(), run.to_save(2)).wait(), folder() + "/step-00000002");
    later.join();
  });
}

TEST_F(AsyncSave, IsWaitedForAlsoWhereAnotherThreadLetsGoOfIt) {
  torch::nn::Linear model(2, 2);
  const HeldFlush held("rank-00000.safetensors");
  std::optional<PendingSave> pending(save_async(folder(), {.model = model, .step = 1}));
  std::thread other([&] { pending.reset(); });
  std::thread later([] {
    std::this_thread::sleep_for(100ms);
    HeldFlush::release();
  });
  std::this_thread::sleep_for(20ms);
  save(folder(), {.model = model, .step = 2});
  EXPECT_EQ(disk::names_in(folder()), (Names{"step-00000001", "step-00000002"}));
  other.join();
  later.join();
}

struct Interruption {};

TEST_F(AsyncSave, MayBeInterruptedWhileItIsWaitedFor) {
  torch::nn::Linear model(2, 2);
  const HeldFlush held("rank-00000.safetensors");
  auto save = save_async(folder(), {.model = model, .step = 1});
  set_caller({.interruption = [] { return std::make_exception_ptr(Interruption()); }});
  EXPECT_THROW(save.wait(), Interruption);
  set_caller({});
  HeldFlush::release();
  EXPECT_EQ(save.wait(), folder() + "/step-00000001");
}

TEST_F(AsyncSave, CanBeMoved) {
  torch::nn::Linear model(2, 2);
  auto first = save_async(folder(), {.model = model, .step = 1});
  auto second = std::move(first);
  EXPECT_TRUE(contains(error_message([&] { first.wait(); }), "was moved from")); // NOLINT: asked on purpose
  second = save_async(folder(), {.model = model, .step = 2});
  EXPECT_EQ(latest(folder()).has_value(), true);
  EXPECT_EQ(second.wait(), folder() + "/step-00000002");
}

} // namespace
} // namespace fsdp::testing
