#pragma once

#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/folder.h"
#include "checkpoint/system_calls.h"
#include "state/forms.h"

/// Models that are trained, saved and loaded.
namespace fsdp::testing {

struct TrainingRun {
  Form form;
  OddNet net;
  std::unique_ptr<torch::optim::AdamW> optimizer;

  float step(int number) {
    const auto loss = net->loss(form == Form::kUnsharded ? 0 : rank(), number); // alone, ranks do the same
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return loss.item<float>();
  }
  StateToSave to_save(int64_t step) {
    return {.model = net, .optimizer = optimizer.get(), .step = step};
  }
  StateToLoad to_load() {
    return {.model = net, .optimizer = optimizer.get()};
  }
};

inline TrainingRun make_run(Form form, double begin) {
  OddNet net = make(form, begin);
  auto optimizer =
      std::make_unique<torch::optim::AdamW>(fsdp::parameters(*net), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  return {form, net, std::move(optimizer)};
}

/// All that a run is, whole.
struct Values {
  StateDict model;
  OptimStateDict optimizer;
};

inline Values values_of(TrainingRun& run) {
  return {full_state_dict(run.net), full_optim_state_dict(run.net, *run.optimizer)};
}

inline void expect_values(TrainingRun& run, const Values& wanted) {
  const auto got = values_of(run);
  ASSERT_EQ(got.model.size(), wanted.model.size());
  for (const auto& item : wanted.model) {
    expect_same(got.model[item.key()], item.value(), item.key());
  }
  ASSERT_EQ(got.optimizer.state.size(), wanted.optimizer.state.size());
  for (const auto& item : wanted.optimizer.state) {
    EXPECT_EQ(got.optimizer.state[item.key()].scalars, item.value().scalars) << item.key();
    for (const auto& [key, tensor] : item.value().tensors) {
      expect_same(got.optimizer.state[item.key()].tensors.at(key), tensor, item.key() + " " + key);
    }
  }
}

/// Of a run that has made some steps.
inline Values trained_values() {
  Values values;
  on_threads(1, [&] {
    TrainingRun run = make_run(Form::kUnsharded, 1000);
    run.step(0);
    run.step(1);
    values = values_of(run);
  });
  return values;
}

/// A run that has these values.
inline TrainingRun make_run(Form form, const Values& values) {
  TrainingRun run = make_run(form, 0.0);
  load_state_dict(run.net, values.model);
  load_optim_state_dict(run.net, *run.optimizer, values.optimizer);
  return run;
}

/// Whatever the point at which a process is killed that saves a second checkpoint, the first or the second is there,
/// whole. Of one rank, without a job.
inline void expect_whole_wherever_it_is_killed(
    const std::string& folder, const std::function<void(TrainingRun& second)>& save_second) {
  const Values values = trained_values();
  TrainingRun first = make_run(Form::kUnsharded, values), second = make_run(Form::kUnsharded, 0.0);
  save(folder, first.to_save(1));
  bool ended = false;
  int64_t point = 0;
  for (; !ended; ++point) {
    const pid_t child = fork();
    if (child == 0) {
      kill_at_point(point);
      save_second(second);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ended = WIFEXITED(status);
    ASSERT_TRUE(ended || WTERMSIG(status) == SIGKILL);
    TrainingRun loaded = make_run(Form::kUnsharded, 5.0);
    const int64_t step = load(folder, loaded.to_load()).step;
    expect_values(loaded, step == 1 ? values : values_of(second));
    if (step == 2) {
      disk::remove_folder_tree(folder + "/step-00000002");
    }
  }
  EXPECT_GT(point, 20);
}

} // namespace fsdp::testing
