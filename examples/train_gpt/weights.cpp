#include "weights.h"

#include <filesystem>
#include <fstream>

#include <fsdp/error.h>
#include <fsdp/init.h>
#include <fsdp/safetensors.h>
#include <nlohmann/json.hpp>

#include "names_of_gpt2.h"

namespace train_gpt {
namespace {

using nlohmann::json;

constexpr const char* kOurs = "train_gpt"; // what no other program has
constexpr const char* kGPT2 = "gpt2";

[[noreturn]] void refuse(const std::string& path, const std::string& got) {
  throw fsdp::Error("[init-from] expected a GPT-2 as this program has it, got " + got + " in " + path);
}

json read_json(const std::string& path) {
  std::ifstream file(path);
  json config = json::parse(file, /*callback=*/nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    throw fsdp::Error("[init-from] expected a model's configuration in " + path + ", got none: name its folder");
  }
  return config;
}

int64_t size_in(const json& config, const char* name, const std::string& path) {
  const json value = config.value(name, json());
  if (!value.is_number_integer() || value.get<int64_t>() < 1 || value.get<int64_t>() > (int64_t{1} << 32)) {
    refuse(path, std::string(name) + ": " + value.dump());
  }
  return value.get<int64_t>();
}

/// What GPT-2 may be configured to do, and this program does not.
void check_variant(const json& config, const std::string& path) {
  const json expected{
      {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", 1e-5},
      {"n_inner", nullptr},
      {"reorder_and_upcast_attn", false},
      {"scale_attn_by_inverse_layer_idx", false},
      {"scale_attn_weights", true},
      {"tie_word_embeddings", true}};
  for (const auto& [name, value] : expected.items()) {
    const json given = config.value(name, value);
    const bool as_by_default = name == "n_inner" && given == 4 * config["n_embd"].get<int64_t>();
    if (given != value && !as_by_default) {
      refuse(path, name + ": " + given.dump());
    }
  }
}

json to_json(const GPTConfig& config) {
  return {
      {"model_type", config.gpt2 ? kGPT2 : kOurs},
      {"architectures", {config.gpt2 ? "GPT2LMHeadModel" : "GPT"}},
      {"n_embd", config.width},
      {"n_layer", config.layers},
      {"n_head", config.heads},
      {"n_positions", config.positions > 0 ? config.positions : config.sequence},
      {"vocab_size", config.vocabulary},
      {"activation_function", config.gpt2 ? "gelu_new" : "gelu"},
      {"layer_norm_epsilon", 1e-5},
      {"attn_pdrop", 0.0},
      {"embd_pdrop", 0.0},
      {"resid_pdrop", config.dropout},
      {"tie_word_embeddings", true},
      {"bos_token_id", nullptr}, // bytes have no such
      {"eos_token_id", nullptr}};
}

void write_config(const std::string& folder, const GPTConfig& config) {
  const std::string path = folder + "/config.json";
  std::ofstream file(path + ".tmp");
  file << to_json(config).dump(/*indent=*/2) << std::endl;
  std::error_code error;
  std::filesystem::rename(path + ".tmp", path, error);
  if (!file || error) {
    throw fsdp::Error("[export] expected to write " + path + ", could not: name another folder with --export DIR");
  }
}

/// Files of GPT-2 have names with or without what stands before all of them.
fsdp::NameInFiles names_after(const std::string& begin) {
  return [begin](const std::string& name) { return begin + name_in_gpt2(name); };
}

std::string listed(const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) {
    list += (list.empty() ? "" : ", ") + name;
  }
  return list;
}

void import_gpt2(const std::string& folder, GPT& model) {
  // Not strict: old files have masks too, and the embedding twice.
  const auto missing_after = [&](const char* begin) {
    const fsdp::ImportSafetensorsOptions options{
        .strict = false, .name_in_files = names_after(begin), .transposed = is_transposed_in_gpt2};
    return fsdp::import_safetensors(folder, model, options).missing;
  };
  auto missing = missing_after("transformer.");
  if (missing.size() == model->parameters().size()) {
    missing = missing_after("");
  }
  if (missing.empty()) {
    return;
  }
  throw fsdp::Error("[init-from] expected all weights of a GPT-2 in " + folder + ", got none for " + listed(missing));
}

} // namespace

GPTConfig read_config(const std::string& folder, GPTConfig rest) {
  const std::string path = folder + "/config.json";
  const json config = read_json(path);
  const json type = config.value("model_type", json());
  if (type != kGPT2 && type != kOurs) {
    refuse(path, "model_type: " + type.dump());
  }
  GPTConfig model = rest;
  model.gpt2 = type == kGPT2;
  model.width = size_in(config, "n_embd", path);
  model.layers = size_in(config, "n_layer", path);
  model.heads = size_in(config, "n_head", path);
  model.positions = size_in(config, "n_positions", path);
  model.vocabulary = size_in(config, "vocab_size", path);
  if (model.gpt2) {
    check_variant(config, path);
  }
  if (model.vocabulary < kBytes) {
    refuse(path, "vocab_size: " + std::to_string(model.vocabulary) + ", fewer than there are bytes,");
  }
  return model;
}

void import_weights(const std::string& folder, GPT& model) {
  if (model->config.gpt2) {
    import_gpt2(folder, model);
  } else {
    fsdp::import_safetensors(folder, model);
  }
}

void export_weights(const std::string& folder, GPT& model) {
  fsdp::ExportSafetensorsOptions options;
  if (model->config.gpt2) {
    options.name_in_files = names_after("transformer.");
    options.transposed = is_transposed_in_gpt2;
  }
  fsdp::export_safetensors(folder, model, options);
  if (fsdp::rank() == 0) {
    write_config(folder, model->config);
  }
}

} // namespace train_gpt
