#include "names_of_gpt2.h"

#include <array>
#include <utility>

namespace train_gpt {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 10> kNames{{
    {"attention_norm.", "ln_1."},
    {"attention.qkv.", "attn.c_attn."},
    {"attention.out.", "attn.c_proj."},
    {"mlp_norm.", "ln_2."},
    {"widen.", "mlp.c_fc."},
    {"narrow.", "mlp.c_proj."},
    {"blocks.", "h."},
    {"embedding.", "wte."},
    {"positions.", "wpe."},
    {"norm.", "ln_f."}, // after those that end like it
}};

} // namespace

std::string name_in_gpt2(const std::string& name) {
  std::string theirs = name;
  for (const auto& [from, to] : kNames) {
    const size_t at = theirs.find(from);
    if (at != std::string::npos) {
      theirs.replace(at, std::string(from).size(), to);
    }
  }
  return theirs;
}

bool is_transposed_in_gpt2(const std::string& name) {
  return name.ends_with("qkv.weight") || name.ends_with("out.weight") || name.ends_with("widen.weight") ||
         name.ends_with("narrow.weight");
}

} // namespace train_gpt
