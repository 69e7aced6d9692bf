// Training steps of a GPT: libfsdp ("ours"), or the same model in plain LibTorch without any communication ("compute").
// Started by bench/run.py.
#include <memory>
#include <vector>

#include <fsdp/fsdp.h>

#include "gpt.h"
#include "linear_units.h"
#include "serve.h"

namespace bench {
namespace {

class Contender {
 public:
  virtual ~Contender() = default;
  /// One optimizer step over some micro-batches; the loss of the last.
  virtual float step(const std::vector<torch::Tensor>& micro_batches) = 0;
  /// Bytes on this rank that parameters, gradients and optimizer state may take at most, by the design.
  virtual int64_t bound() const = 0;
};

torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(1e-4);
}

fsdp::FSDPModule fully_shard_blocks(GPT model, const Json& task) {
  fsdp::FullyShardOptions options;
  if (task.at("param_dtype") == "bfloat16") {
    options.mp_policy.param_dtype = torch::kBFloat16;
    options.mp_policy.reduce_dtype = torch::kFloat;
  }
  if (task.at("offload")) {
    options.offload_policy = fsdp::CPUOffloadPolicy{.pin_memory = false};
  }
  for (auto& block : *model->blocks) {
    fsdp::fully_shard(*block, options);
  }
  return fsdp::fully_shard(*model, options);
}

fsdp::FSDPModule wrap_blocks(GPT model) {
  fsdp::FSDPOptions options;
  options.auto_wrap_policy = fsdp::ModuleWrapPolicy::of<BlockImpl>();
  return fsdp::FullyShardedDataParallel<GPT>(model, options).unit();
}

class Ours : public Contender {
 public:
  Ours(GPT model, const Json& task) : model_(model) {
    const bool fsdp1 = task.at("contender") == "ours_fsdp1";
    root_ = std::make_unique<fsdp::FSDPModule>(fsdp1 ? wrap_blocks(model) : fully_shard_blocks(model, task));
    optimizer_ = std::make_unique<fsdp::optim::AdamW>(model->parameters(), adamw());
  }

  float step(const std::vector<torch::Tensor>& micro_batches) override {
    torch::Tensor loss;
    for (size_t i = 0; i < micro_batches.size(); ++i) {
      root_->set_requires_gradient_sync(i + 1 == micro_batches.size());
      loss = model_->loss(micro_batches[i]);
      loss.backward();
    }
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.item<float>();
  }

  int64_t bound() const override {
    const fsdp::Description description = fsdp::describe(*root_);
    return description.bytes_peak + 2 * description.bytes_shard; // AdamW keeps two numbers for each of a shard
  }

 private:
  GPT model_;
  std::unique_ptr<fsdp::FSDPModule> root_;
  std::unique_ptr<fsdp::optim::AdamW> optimizer_;
};

/// The work that no way of sharding can avoid: forward, backward, and the optimizer on this rank's share.
class Compute : public Contender {
 public:
  Compute(GPT model, int64_t ranks) : model_(model), parameters_(model->parameters()) {
    for (const auto& parameter : parameters_) {
      shares_.push_back(share_of(parameter.detach(), ranks).requires_grad_(true));
    }
    ranks_ = ranks;
    optimizer_ = std::make_unique<fsdp::optim::AdamW>(shares_, adamw());
  }

  float step(const std::vector<torch::Tensor>& micro_batches) override {
    torch::Tensor loss;
    for (const auto& batch : micro_batches) {
      loss = model_->loss(batch);
      loss.backward();
    }
    for (size_t i = 0; i < shares_.size(); ++i) {
      shares_[i].mutable_grad() = share_of(parameters_[i].grad(), ranks_);
    }
    optimizer_->step();
    for (auto& share : shares_) {
      share.mutable_grad().reset();
    }
    model_->zero_grad();
    return loss.item<float>();
  }

  int64_t bound() const override {
    return 0;
  }

 private:
  static torch::Tensor share_of(const torch::Tensor& whole, int64_t ranks) {
    return whole.flatten().narrow(0, 0, whole.numel() / ranks);
  }

  GPT model_;
  std::vector<torch::Tensor> parameters_, shares_;
  int64_t ranks_;
  std::unique_ptr<fsdp::optim::AdamW> optimizer_;
};

std::unique_ptr<Contender> make_contender(const Json& task) {
  const bool ours = task.at("contender") != "compute";
  if (ours) {
    fsdp::init();
  }
  GPT model(GPTConfig{task.at("width"), task.at("layers"), task.at("sequence")});
  load_weights(*model, task.at("weights"));
  if (ours) {
    return std::make_unique<Ours>(model, task);
  }
  return std::make_unique<Compute>(model, task.at("ranks"));
}

class Batches {
 public:
  explicit Batches(const Json& task)
      : tokens_(load_tokens(task.at("tokens"), task.at("tokens_shape"))), rank_(task.at("rank")) {}

  std::vector<torch::Tensor> next() {
    return tokens_.select(0, step_++ % tokens_.size(0)).select(0, rank_).unbind();
  }

 private:
  torch::Tensor tokens_;
  int64_t rank_, step_ = 0;
};

/// Seconds that sharding 50 units of 10 layers takes.
Json time_sharding() {
  fsdp::init();
  LinearUnits model(/*count=*/50, /*linears=*/10);
  fsdp::barrier();
  const auto start = std::chrono::steady_clock::now();
  model->shard({});
  return seconds_since(start);
}

Json run_steps(Contender& contender, Batches& batches, int64_t steps) {
  std::vector<float> losses;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < steps; ++i) {
    losses.push_back(contender.step(batches.next()));
  }
  return {{"seconds", seconds_since(start) / static_cast<double>(steps)}, {"losses", losses}};
}

} // namespace
} // namespace bench

int main(int, char** argv) {
  const bench::Json task = bench::Json::parse(argv[1]);
  std::unique_ptr<bench::Contender> contender;
  bench::Batches batches(task);
  bench::serve({
      {"start",
       [&](const bench::Json&) {
         contender = bench::make_contender(task);
         return bench::Json(true);
       }},
      {"shard", [](const bench::Json&) { return bench::time_sharding(); }},
      {"bound", [&](const bench::Json&) { return bench::Json(contender->bound()); }},
      {"steps", [&](const bench::Json& request) { return bench::run_steps(*contender, batches, request.at("count")); }},
  });
}
