#include "checkpoints.h"

#include <iostream>

#include <fsdp/error.h>
#include <fsdp/save.h>

namespace train_gpt {
namespace {

using Notes = std::map<std::string, c10::IValue>;

/// What decides what a step computes, beside what the checkpoint sets itself. The rest may change when a run goes on.
const std::vector<std::string> kSameOptions = {
    "model", "heads", "seq", "batch", "accumulate", "weight-decay", "dropout", "seed"};

std::string option(const Options& options, const std::string& name) {
  for (const auto& [other, value] : options.values) {
    if (other == name) {
      return value;
    }
  }
  return "";
}

std::string text_of(const Notes& notes, const std::string& name) {
  const auto found = notes.find(name);
  return found != notes.end() && found->second.isString() ? found->second.toStringRef() : "";
}

/// [steps, numbers of one]
torch::Tensor to_tensor(const std::vector<StepRecord>& steps) {
  std::vector<double> numbers;
  for (const auto& step : steps) {
    numbers.insert(
        numbers.end(),
        {static_cast<double>(step.step),
         step.loss,
         step.learning_rate,
         step.gradient_norm,
         step.tokens_per_second,
         step.memory,
         step.seconds});
  }
  return torch::tensor(numbers, torch::kDouble).view({static_cast<int64_t>(steps.size()), -1});
}

std::vector<StepRecord> to_steps(const torch::Tensor& table) {
  std::vector<StepRecord> steps;
  const auto rows = table.accessor<double, 2>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    const auto row = rows[i];
    steps.push_back(
        {.step = static_cast<int64_t>(row[0]),
         .loss = row[1],
         .learning_rate = row[2],
         .gradient_norm = row[3],
         .tokens_per_second = row[4],
         .memory = row[5],
         .seconds = row[6]});
  }
  return steps;
}

} // namespace

Checkpoints::Checkpoints(const Options& options, const Batches& batches, const Team& team)
    : options_(options), batches_(batches), team_(team) {
  path_ = options.save.empty() ? "" : fsdp::latest(options.save).value_or("");
  team.expect_same(path_, "checkpoints");
  if (!path_.empty() && !options.resume) {
    throw fsdp::Error(
        "[save] expected a folder without checkpoints, got " + path_ +
        ": add --resume to go on from there, or name another folder with --save DIR");
  }
}

void Checkpoints::resume(Trainer& trainer, History& history) {
  if (path_.empty()) {
    if (options_.resume && team_.leads()) {
      std::cout << "No checkpoint in " << options_.save << " yet: the run begins.\n" << std::endl;
    }
    return;
  }
  const auto loaded = fsdp::load(path_, {.model = trainer.model(), .optimizer = &trainer.optimizer()});
  expect_same_run(loaded.extra);
  history.steps = to_steps(loaded.extra.at("history").toTensor());
  history.held_back_before = loaded.extra.at("held_back_before").toDouble();
  history.facts.emplace_back("Resumed from", path_);
  trainer.go_on(history.steps.back(), loaded.extra.at("rows_per_step").toInt());
  if (team_.leads()) {
    std::cout << "Going on after step " << loaded.step << ", from " << path_ << "\n" << std::endl;
  }
}

bool Checkpoints::due(int64_t step, bool last) const {
  return !options_.save.empty() && (last || (options_.save_every > 0 && step % options_.save_every == 0));
}

void Checkpoints::save(Trainer& trainer, const History& history) {
  path_ = fsdp::save(
      options_.save,
      {.model = trainer.model(),
       .optimizer = &trainer.optimizer(),
       .extra = notes(trainer, history),
       .step = history.steps.back().step},
      {.keep_last = options_.keep_last});
}

Notes Checkpoints::notes(const Trainer& trainer, const History& history) const {
  Notes notes{
      {"text", std::to_string(batches_.fingerprint())},
      {"history", to_tensor(history.steps)},
      {"held_back_before", *history.held_back_before},
      {"rows_per_step", trainer.rows_per_step()}};
  for (const auto& name : kSameOptions) {
    notes["--" + name] = option(options_, name);
  }
  return notes;
}

void Checkpoints::expect_same_run(const Notes& notes) const {
  if (text_of(notes, "text") != std::to_string(batches_.fingerprint())) {
    throw fsdp::Error("[resume] expected the text that the run began with, got another: name it with --data FILE");
  }
  for (const auto& name : kSameOptions) {
    const std::string before = text_of(notes, "--" + name), now = option(options_, name);
    if (before != now) {
      throw fsdp::Error(
          "[resume] expected --" + name + " " + before + ", with which the run began, got " + now +
          ": give the same options, or name another folder with --save DIR");
    }
  }
}

} // namespace train_gpt
