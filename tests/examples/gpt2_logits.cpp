// What the trainer's model makes of the bytes 0, 1, 2 and so on, with the weights of a folder, sharded: for
// tests/python/test_trainer_weights.py, which compares it with what transformers makes of them.

#include <fstream>
#include <iostream>

#include <fsdp/fsdp.h>

#include "sharding.h"
#include "weights.h"

int main(int argc, char** argv) {
  using namespace train_gpt; // NOLINT: of which this is a test
  if (argc != 4) {
    std::cerr << "gpt2_logits FOLDER BYTES OUTPUT" << std::endl;
    return EXIT_FAILURE;
  }
  try {
    fsdp::init({.device = "cpu"});
    Options options;
    options.model = read_config(argv[1], options.model);
    GPT model(options.model);
    shard(model, options);
    import_weights(argv[1], model);
    torch::NoGradGuard no_grad;
    const auto logits = model->forward(torch::arange(std::stoll(argv[2])).unsqueeze(0));
    if (fsdp::rank() == 0) {
      std::ofstream(argv[3], std::ios::binary)
          .write(static_cast<const char*>(logits.const_data_ptr()), static_cast<std::streamsize>(logits.nbytes()));
    }
    fsdp::barrier();
    fsdp::shutdown();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return EXIT_FAILURE;
  }
}
