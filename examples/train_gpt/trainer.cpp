#include "trainer.h"

#include <limits>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/error.h>
#include <fsdp/init.h>

#include "interrupt.h"
#include "sharding.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

GPT build_model(const Options& options) {
  torch::manual_seed(options.seed); // every rank builds the same model
  GPT model(options.model);
  model->to(fsdp::device());
  torch::manual_seed(options.seed + 1 + fsdp::rank()); // what is dropped out differs
  return model;
}

} // namespace

Trainer::Trainer(const Options& options, const Batches& batches, const Team& team)
    : options_(options),
      batches_(batches),
      team_(team),
      schedule_{options.lr, options.warmup, options.steps},
      rows_(options.batch),
      model_(build_model(options)) {
  if (!options.single) {
    root_ = shard(model_, options);
  }
  auto adamw = torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay).betas({0.9, 0.95});
  optimizer_ = std::make_unique<fsdp::optim::AdamW>(model_->parameters(), adamw);
}

void Trainer::go_on(const StepRecord& last, int64_t rows_per_step) {
  if (rows_per_step % team_.size() != 0) {
    throw fsdp::Error(
        "[resume] expected a number of ranks that divides the run's " + std::to_string(rows_per_step) +
        " sequences per micro-batch, got " + std::to_string(team_.size()) + ": start another number of ranks");
  }
  rows_ = rows_per_step / team_.size();
  began_ = Clock::now() - std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(last.seconds));
}

StepRecord Trainer::step(int64_t index) {
  auto start = Clock::now();
  began_ = began_.value_or(start);
  double rate = schedule_.learning_rate(index);
  set_learning_rate(rate);
  double loss = compute_gradients(index);
  double norm = clip();
  optimizer_->step();
  optimizer_->zero_grad();

  auto sums = team_.sum({loss, static_cast<double>(memory_.read()), interrupted() ? 1.0 : 0.0});
  auto end = Clock::now();
  auto micro_batches = static_cast<double>(options_.accumulate * team_.size());
  double tokens = micro_batches * static_cast<double>(rows_ * options_.model.sequence);
  asked_to_stop_ = sums[2] > 0;
  return {
      .step = index + 1,
      .loss = sums[0] / micro_batches,
      .learning_rate = rate,
      .gradient_norm = norm,
      .tokens_per_second = tokens / seconds_between(start, end),
      .memory = sums[1],
      .seconds = seconds_between(*began_, end),
  };
}

void Trainer::set_learning_rate(double rate) {
  for (auto& group : optimizer_->param_groups()) {
    group.options().set_lr(rate);
  }
}

double Trainer::compute_gradients(int64_t index) {
  double loss = 0;
  for (int64_t rank : team_.mine()) {
    loss += compute_gradients(index, rank);
    if (!sharded()) {
      mean_.take(model_->parameters());
    }
  }
  if (!sharded()) {
    mean_.give(model_->parameters());
  }
  return loss;
}

double Trainer::compute_gradients(int64_t index, int64_t rank) {
  double sum = 0;
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    if (root_) {
      root_->set_requires_gradient_sync(/*requires_gradient_sync=*/i + 1 == options_.accumulate);
    }
    auto batch = batches_.training({options_.seed, index * options_.accumulate + i, rank * rows_}, rows_);
    auto loss = model_->loss(batch.bytes.to(fsdp::device()), batch.next.to(fsdp::device()));
    (loss / options_.accumulate).backward();
    sum += loss.item<double>();
  }
  return sum;
}

double Trainer::clip() {
  double limit = options_.clip > 0 ? options_.clip : std::numeric_limits<double>::infinity();
  return fsdp::clip_grad_norm_(model_, limit).item<double>();
}

} // namespace train_gpt
