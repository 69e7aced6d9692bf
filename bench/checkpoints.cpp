// Checkpoints of a GPT that libfsdp has sharded, with the state of AdamW. Started by bench/run.py.
#include <memory>
#include <optional>

#include <fsdp/fsdp.h>

#include "gpt.h"
#include "serve.h"

namespace bench {
namespace {

GPT sharded_gpt(const Json& task) {
  fsdp::init();
  GPT model(GPTConfig{task.at("width"), task.at("layers"), task.at("sequence")});
  load_weights(*model, task.at("weights"));
  for (auto& block : *model->blocks) {
    fsdp::fully_shard(*block);
  }
  fsdp::fully_shard(*model);
  return model;
}

class Run {
 public:
  explicit Run(const Json& task)
      : model_(sharded_gpt(task)),
        optimizer_(model_->parameters(), torch::optim::AdamWOptions(1e-4)),
        batch_(load_tokens(task.at("tokens"), task.at("tokens_shape"))[0][task.at("rank").get<int64_t>()][0].clone()) {}

  float step() {
    const auto loss = model_->loss(batch_);
    loss.backward();
    optimizer_.step();
    optimizer_.zero_grad();
    return loss.item<float>();
  }

  double save(const std::string& folder) {
    return timed([&] { fsdp::save(folder, {.model = *model_, .optimizer = &optimizer_}); });
  }
  /// How long training stands still.
  double save_async(const std::string& folder) {
    return timed([&] { pending_ = fsdp::save_async(folder, {.model = *model_, .optimizer = &optimizer_}); });
  }
  std::string wait() {
    return pending_->wait();
  }
  double load(const std::string& folder) {
    return timed([&] { fsdp::load(folder, {.model = *model_, .optimizer = &optimizer_}); });
  }
  double export_weights(const std::string& folder) {
    return timed([&] { fsdp::export_safetensors(folder, *model_); });
  }
  /// Bytes of one block's parameters.
  int64_t bytes_of_unit() {
    int64_t bytes = 0;
    for (const auto& held : fsdp::held(*model_->blocks[0])) {
      bytes += c10::multiply_integers(held.sizes) * static_cast<int64_t>(held.local.element_size());
    }
    return bytes;
  }

 private:
  static double timed(const std::function<void()>& body) {
    fsdp::barrier();
    const auto start = std::chrono::steady_clock::now();
    body();
    return seconds_since(start);
  }

  GPT model_;
  fsdp::optim::AdamW optimizer_;
  torch::Tensor batch_;
  std::optional<fsdp::PendingSave> pending_;
};

} // namespace
} // namespace bench

int main(int, char** argv) {
  using bench::Json;
  const Json task = Json::parse(argv[1]);
  std::unique_ptr<bench::Run> run;
  bench::serve({
      {"start",
       [&](const Json&) {
         run = std::make_unique<bench::Run>(task);
         return Json(true);
       }},
      {"step", [&](const Json&) { return Json(run->step()); }},
      {"save", [&](const Json& request) { return Json(run->save(request.at("folder"))); }},
      {"save_async", [&](const Json& request) { return Json(run->save_async(request.at("folder"))); }},
      {"wait", [&](const Json&) { return Json(run->wait()); }},
      {"load", [&](const Json& request) { return Json(run->load(request.at("folder"))); }},
      {"export", [&](const Json& request) { return Json(run->export_weights(request.at("folder"))); }},
      {"bytes_of_unit", [&](const Json&) { return Json(run->bytes_of_unit()); }},
  });
}
