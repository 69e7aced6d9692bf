#pragma once

#include <string>

#include "model.h"

namespace train_gpt {

/// The model that a folder has, as its config.json says: Hugging Face's GPT-2, or what `export_weights` wrote. What the
/// file does not say is as in `rest`. fsdp::Error where this program has no such model.
GPTConfig read_config(const std::string& folder, GPTConfig rest);

/// All ranks together.
void import_weights(const std::string& folder, GPT& model);
/// With the config.json, so that `transformers` makes a GPT2LMHeadModel of a model that is like GPT-2. All ranks
/// together.
void export_weights(const std::string& folder, GPT& model);

} // namespace train_gpt
