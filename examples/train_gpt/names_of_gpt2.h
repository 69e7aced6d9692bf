#pragma once

#include <string>

namespace train_gpt {

/// What a tensor of our model is called in GPT-2's: "blocks.0.widen.weight" is "h.0.mlp.c_fc.weight".
std::string name_in_gpt2(const std::string& name);

/// Whether GPT-2 has it with rows and columns exchanged: it keeps the weights of linear layers as [in, out].
bool is_transposed_in_gpt2(const std::string& name);

} // namespace train_gpt
