#pragma once

#include <string>

#include "batches.h"
#include "model.h"
#include "team.h"

namespace train_gpt {

/// The mean loss on the held-back text, the work divided among the ranks. All ranks together.
double held_back_loss(GPT& model, const Batches& batches, const Team& team, int64_t rows);

struct SampleOptions {
  std::string prompt = "The ";
  int64_t bytes = 300;
  int64_t seed = 1;
  double temperature = 0.8; ///< below 1 prefers what is likely
};

/// What the model writes after the prompt, with the prompt. All ranks together; each gets the same.
std::string write_sample(GPT& model, const SampleOptions& options);

} // namespace train_gpt
