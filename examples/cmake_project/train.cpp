// An ordinary LibTorch model; the lines with fsdp:: are all that shards it.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 128));
    output = register_module("output", torch::nn::Linear(128, 2));
  }
  torch::Tensor forward(const torch::Tensor& points) {
    return output(torch::relu(hidden(points)));
  }
  torch::nn::Linear hidden{nullptr}, output{nullptr};
};
TORCH_MODULE(Classifier);

int main() {
  fsdp::init();
  torch::manual_seed(0);
  Classifier model;
  fsdp::fully_shard(model);
  fsdp::optim::AdamW optimizer(model->parameters(), 1e-2);

  torch::manual_seed(1 + fsdp::rank());
  for (int step = 1; step <= 100; ++step) {
    auto points = torch::randn({64, 2}, fsdp::device());
    auto inside = (points.norm(2, 1) < 1.0).to(torch::kLong); // is the point in the unit circle?
    auto scores = model(points);
    auto loss = torch::nn::functional::cross_entropy(scores, inside);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step % 20 == 0 && fsdp::rank() == 0) {
      auto right = (scores.argmax(1) == inside).to(torch::kFloat).mean().item<float>();
      std::cout << "step " << step << "  loss " << loss.item<float>() << "  right " << 100 * right << " %" << std::endl;
    }
  }
}
