#include "evaluate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fsdp/init.h>

namespace train_gpt {
namespace {

/// Nothing is dropped out meanwhile.
class Evaluating {
 public:
  explicit Evaluating(GPT& model) : model_(model) {
    model_->eval();
  }
  ~Evaluating() {
    model_->train();
  }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  GPT& model_;
};

} // namespace

double held_back_loss(GPT& model, const Batches& batches, const Team& team, int64_t rows) {
  torch::NoGradGuard no_grad;
  const Evaluating evaluating(model);
  double loss = 0;
  // All ranks run the same number of batches, since they gather parameters together: where the text has come to its
  // end, a batch is computed and not counted.
  for (int64_t first = 0; first < batches.held_back_windows(); first += rows * team.size()) {
    for (int64_t rank : team.mine()) {
      int64_t begin = first + rank * rows;
      bool counts = begin < batches.held_back_windows();
      auto batch = batches.held_back(counts ? begin : 0, rows);
      auto mean = model->loss(batch.bytes.to(fsdp::device()), batch.next.to(fsdp::device()));
      loss += counts ? mean.item<double>() * static_cast<double>(batch.bytes.size(0)) : 0;
    }
  }
  return team.sum({loss})[0] / static_cast<double>(batches.held_back_windows());
}

std::string write_sample(GPT& model, const SampleOptions& options) {
  torch::NoGradGuard no_grad;
  const Evaluating evaluating(model);
  auto generator = at::detail::createCPUGenerator(options.seed); // the same on all ranks
  std::string text = options.prompt;
  for (int64_t i = 0; i < options.bytes; ++i) {
    std::string recent = text.substr(text.size() - std::min<size_t>(text.size(), model->config.sequence));
    auto bytes =
        torch::from_blob(recent.data(), {1, static_cast<int64_t>(recent.size())}, torch::kByte).to(torch::kLong);
    auto logits = model->forward(bytes.to(fsdp::device())).select(1, -1).narrow(-1, 0, kBytes);
    logits = logits.to(torch::kCPU, torch::kFloat);
    auto chances = torch::softmax(logits / options.temperature, -1);
    text += static_cast<char>(torch::multinomial(chances, 1, /*replacement=*/false, generator).item<int64_t>());
  }
  return text;
}

} // namespace train_gpt
