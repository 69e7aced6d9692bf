#include "options.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>
#include <stdexcept>

#include <fsdp/error.h>

#include "flags.h"
#include "weights.h"

namespace train_gpt {
namespace {

/// The options as they were written, before they are put together.
struct Written {
  std::string model = "rotary";
  std::string size = "tiny";
  std::string api = "fsdp2";
  std::string mesh;
  std::string reshard;
  std::string param_dtype;
  std::string reduce_dtype;
  int64_t width = 0;
  int64_t layers = 0;
  int64_t heads = 0;
};

struct Shape {
  int64_t width;
  int64_t layers;
  int64_t heads;
};

const std::map<std::string, Shape> kSizes = {
    {"tiny", {128, 4, 4}},
    {"small", {256, 6, 4}},
    {"medium", {512, 8, 8}},
    {"large", {768, 12, 12}},
};

const std::map<std::string, c10::ScalarType> kDtypes = {
    {"bfloat16", c10::kBFloat16},
    {"float16", c10::kHalf},
    {"float32", c10::kFloat},
};

template <typename Value>
Value choose(const std::map<std::string, Value>& choices, const std::string& flag, const std::string& given) {
  auto found = choices.find(given);
  if (found != choices.end()) {
    return found->second;
  }
  std::string names;
  for (const auto& choice : choices) {
    names += (names.empty() ? "" : ", ") + choice.first;
  }
  throw fsdp::Error("[options] expected one of " + names + " for --" + flag + ", got '" + given + "'");
}

void require(bool holds, const std::string& message) {
  if (!holds) {
    throw fsdp::Error("[options] " + message);
  }
}

Flags make_flags(Options& options, Written& written) {
  Flags flags;
  flags.heading("Model");
  flags.text("model", "NAME", "rotary, or gpt2: as Hugging Face has it", written.model);
  flags.text("size", "NAME", "tiny, small, medium or large", written.size);
  flags.number("width", "0: the size's", written.width, 0);
  flags.number("layers", "0: the size's", written.layers, 0);
  flags.number("heads", "0: the size's", written.heads, 0);
  flags.number("seq", "bytes in a sequence", options.model.sequence, 2);
  flags.text("init-from", "DIR", "its config.json says which model, and its weights are the first", options.init_from);
  flags.text("export", "DIR", "write the weights there at the end, as Hugging Face does", options.export_to);
  flags.heading("Training");
  flags.text("data", "FILE", "text to learn; without it, the help texts that come with Python", options.data);
  flags.number("steps", "optimizer steps", options.steps, 1);
  flags.number("batch", "sequences per rank and micro-batch", options.batch, 1);
  flags.number("accumulate", "micro-batches per step", options.accumulate, 1);
  flags.number("lr", "highest learning rate; 0: half of one over the width", options.lr, 0.0);
  flags.number("warmup", "steps up to it; then a cosine down to a tenth", options.warmup, 0);
  flags.number("weight-decay", "of AdamW", options.weight_decay, 0.0);
  flags.number("clip", "largest norm of the gradient, 0 for no limit", options.clip, 0.0);
  flags.number("dropout", "share of what each block adds that is left out", options.model.dropout, 0.0);
  flags.number("seed", "of the initial weights, the order of the data and the sample", options.seed, 0);
  flags.heading("Sharding");
  flags.text("backend", "NAME", "shm, gloo, nccl; without it, by device and hosts", options.backend);
  flags.text(
      "device",
      "NAME",
      "cpu, cuda; without it, cuda where there is one, and for each rank of torchrun or launch",
      options.device);
  flags.text("api", "NAME", "fsdp2: fully_shard; fsdp1: FullyShardedDataParallel", written.api);
  flags.text("mesh", "RxS", "hybrid: R replicas of a model sharded over S ranks", written.mesh);
  flags.text("reshard-after-forward", "R", "true, false, or to how many ranks", written.reshard);
  flags.text("param-dtype", "DTYPE", "compute in it: bfloat16, float16", written.param_dtype);
  flags.text("reduce-dtype", "DTYPE", "reduce gradients in it", written.reduce_dtype);
  flags.toggle("offload", "keep shards, gradients and optimizer in host memory", options.offload);
  flags.toggle("checkpoint-activations", "compute each block again in backward", options.model.checkpoint);
  flags.number("threads", "for computing, per rank; 0 divides the cores", options.threads, 0);
  flags.heading("Checkpoints");
  flags.text("save", "DIR", "write them there: at the end, and where the run is stopped before", options.save);
  flags.number("save-every", "steps; 0: at the end only", options.save_every, 0);
  flags.number("keep-last", "of them; 0 keeps all", options.keep_last, 0);
  flags.toggle("resume", "go on from the latest in --save, if there is one, on any number of ranks", options.resume);
  flags.heading("Comparison");
  flags.toggle("single", "the same run in one process without libfsdp's sharding", options.single);
  flags.number("ranks", "with --single: compute the batches of so many ranks", options.ranks, 1);
  flags.heading("Results");
  flags.text("out", "DIR", "folder for the results; without it, train_gpt beside the program's folder", options.out);
  flags.text("report", "FILE", "the report; without it, report.html in --out", options.report);
  flags.number("sample", "bytes that the model writes at the end", options.sample, 0);
  flags.toggle("help", "this text", options.help);
  return flags;
}

GPTConfig complete(GPTConfig model, const Written& written) {
  model.gpt2 = choose<bool>({{"gpt2", true}, {"rotary", false}}, "model", written.model);
  Shape shape = choose(kSizes, "size", written.size);
  model.width = written.width ? written.width : shape.width;
  model.layers = written.layers ? written.layers : shape.layers;
  model.heads = written.heads ? written.heads : shape.heads;
  return model;
}

GPTConfig complete_from(const std::string& folder, const GPTConfig& rest, const Written& written) {
  require(
      written.width == 0 && written.layers == 0 && written.heads == 0,
      "expected no --width, --layers or --heads beside --init-from, whose config.json has them: leave them out");
  const GPTConfig model = read_config(folder, rest);
  require(
      model.sequence <= model.positions,
      "expected no more than " + std::to_string(model.positions) +
          " for --seq, which are the positions that the model in " + folder + " knows, got " +
          std::to_string(model.sequence));
  return model;
}

std::vector<int64_t> read_mesh(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream in(text);
  char times = 'x';
  for (int64_t size = 0; times == 'x' && in >> size && size > 0;) {
    sizes.push_back(size);
    times = 0;
    in >> times;
  }
  require(
      sizes.size() == 2 && in.eof() && times == 0,
      "expected replicas x shards for --mesh, as in 2x4, got '" + text + "'");
  return sizes;
}

fsdp::ReshardAfterForward read_reshard(const std::string& text) {
  if (text == "true" || text == "false") {
    return text == "true";
  }
  bool digits = !text.empty() && text.size() < 7 && std::all_of(text.begin(), text.end(), ::isdigit);
  require(
      digits && std::stoi(text) > 0,
      "expected true, false or a number of ranks for --reshard-after-forward, got '" + text + "'");
  return std::stoi(text);
}

std::filesystem::path default_folder() {
  std::error_code error;
  std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "train_gpt_results" : program.parent_path().parent_path() / "train_gpt";
}

void complete(Options& options, const Written& written) {
  options.model = options.init_from.empty() ? complete(options.model, written)
                                            : complete_from(options.init_from, options.model, written);
  require(
      options.model.width % (2 * options.model.heads) == 0,
      "expected a width that is a multiple of twice the heads, got " + std::to_string(options.model.width) + " and " +
          std::to_string(options.model.heads) + ": change --width or --heads");
  if (options.lr == 0) {
    options.lr = 0.5 / static_cast<double>(options.model.width); // wide models need small steps
  }
  options.fsdp1 = choose<bool>({{"fsdp1", true}, {"fsdp2", false}}, "api", written.api);
  if (!written.mesh.empty()) {
    options.mesh = read_mesh(written.mesh);
  }
  if (!written.reshard.empty()) {
    options.reshard_after_forward = read_reshard(written.reshard);
  }
  if (!written.param_dtype.empty()) {
    options.param_dtype = choose(kDtypes, "param-dtype", written.param_dtype);
  }
  if (!written.reduce_dtype.empty()) {
    options.reduce_dtype = choose(kDtypes, "reduce-dtype", written.reduce_dtype);
  }
  if (options.out.empty()) {
    options.out = default_folder().string();
  }
  if (options.report.empty()) {
    options.report = (std::filesystem::path(options.out) / "report.html").string();
  }
}

void check_together(const Options& options) {
  require(
      !options.save.empty() || (!options.resume && options.save_every == 0),
      "expected --save DIR beside --resume and --save-every, got none: name the folder of the checkpoints");
  require(
      options.model.dropout < 1,
      "expected less than 1 for --dropout, got " + std::to_string(options.model.dropout) + ": it is a share");
  require(
      !options.single || options.model.dropout == 0,
      "expected no --dropout beside --single, whose ranks would share one random number generator: leave one out");
  require(
      options.single || options.ranks == 1,
      "expected --single beside --ranks, got --ranks alone: it is the launcher that starts several ranks, as in "
      "torchrun --no-python --nproc-per-node " +
          std::to_string(options.ranks));
  require(
      !options.fsdp1 || !options.reshard_after_forward.ranks(),
      "expected true or false for --reshard-after-forward beside --api fsdp1, got a number of ranks: leave --api out");
  require(
      !options.single || (!options.param_dtype && !options.reduce_dtype),
      "expected no --param-dtype and no --reduce-dtype beside --single, which is plain LibTorch: leave them out");
}

} // namespace

Options parse_options(int argc, char** argv) {
  Options options;
  Written written;
  Flags flags = make_flags(options, written);
  flags.parse({argv + 1, argv + argc});
  if (!options.help) {
    complete(options, written);
    check_together(options);
    written.model = options.model.gpt2 ? "gpt2" : "rotary";
    written.width = options.model.width;
    written.layers = options.model.layers;
    written.heads = options.model.heads;
  }
  options.values = flags.values();
  std::erase_if(options.values, [&](const auto& value) { return value.first == "ranks" && !options.single; });
  return options;
}

std::string help_text() {
  Options options;
  Written written;
  return "Trains a GPT on the bytes of a text, sharded over the ranks that a launcher starts.\n\n"
         "  train_gpt                                                  one process\n"
         "  torchrun --no-python --nproc-per-node 2 train_gpt          two ranks\n"
         "  mpirun -n 2 train_gpt                                      the same\n"
         "  train_gpt --single --ranks 2                               the same numbers, unsharded, in one process\n" +
         make_flags(options, written).help();
}

} // namespace train_gpt
