#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <numbers>

#include <fsdp/fsdp.h>
#include <torch/cuda.h>

#include "batches.h"
#include "checkpoints.h"
#include "evaluate.h"
#include "history.h"
#include "interrupt.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "team.h"
#include "text.h"
#include "trainer.h"
#include "weights.h"
#include "words.h"

namespace train_gpt {
namespace {

// With --single, as many as a rank would have: the order of the additions in a matrix product depends on it.
void choose_threads(const Options& options, const Team& team) {
  if (options.threads > 0) {
    torch::set_num_threads(static_cast<int>(options.threads));
  } else if (!std::getenv("OMP_NUM_THREADS")) {
    const int64_t cores = torch::get_num_threads(); // those that this process may use
    torch::set_num_threads(static_cast<int>(std::max<int64_t>(cores / team.on_this_host(), 1)));
  }
}

History describe_run(const Options& options, const Text& text, const Batches& batches, const Team& team) {
  History history;
  history.options = options.values;
  history.facts = {
      {"Ranks", options.single ? print("%ld, computed in one process", team.size()) : std::to_string(team.size())},
      {"Communication", fsdp::world()->name()},
      {"Device", fsdp::device().str()},
      {"Threads per rank", std::to_string(torch::get_num_threads())},
      {"LibTorch", TORCH_VERSION},
      {"Text", text.source},
      {"Bytes to learn from", grouped(batches.training_bytes())},
      {"Bytes held back", grouped(batches.held_back_bytes())},
  };
  return history;
}

int64_t count_parameters(const History& history, GPT& model) {
  int64_t count = 0;
  for (const auto& unit : history.units) {
    count += unit.numel;
  }
  for (const auto& parameter : model->parameters()) {
    count += history.units.empty() ? parameter.numel() : 0;
  }
  return count;
}

void describe_model(Trainer& trainer, const Team& team, History& history) {
  std::string table;
  if (trainer.sharded()) {
    auto description = fsdp::describe(trainer.model());
    history.units = description.units;
    table = description.str();
  }
  std::string parameters = grouped(count_parameters(history, trainer.model()));
  history.facts.insert(history.facts.begin(), {"Parameters", parameters});
  if (team.leads()) {
    std::cout << "GPT with " << parameters << " parameters, "
              << (trainer.sharded() ? "sharded over " : "the batches of ") << team.size()
              << (team.size() == 1 ? " rank\n" : " ranks\n") << table << std::endl;
  }
}

/// A run: what takes its steps, and what is written of them.
struct Run {
  const Options& options;
  const Team& team;
  Trainer& trainer;
  Checkpoints& checkpoints;
  MetricsFile& metrics;
  History& history;
};

void train(const Run& run) {
  Progress progress(run.options.steps, /*quiet=*/!run.team.leads());
  bool stop = false;
  for (auto step = static_cast<int64_t>(run.history.steps.size()); step < run.options.steps && !stop; ++step) {
    const auto& record = run.history.steps.emplace_back(run.trainer.step(step));
    run.metrics.step(record);
    progress.show(record);
    stop = run.trainer.asked_to_stop();
    if (run.checkpoints.due(record.step, /*last=*/stop || record.step == run.options.steps)) {
      run.checkpoints.save(run.trainer, run.history);
      stop = run.team.any(interrupted()); // or meanwhile
    }
  }
  run.history.interrupted = stop;
  progress.finish();
}

/// Only spaces and what can be printed: the model may write any byte.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c != '\n' && (c < 32 || c >= 127); }, '?');
  return text;
}

void conclude(const Options& options, const Checkpoints& checkpoints, const History& history) {
  if (history.interrupted) {
    std::cout << "Stopped after " << history.steps.size() << " of " << options.steps
              << " steps, as asked: no last test and no sample. "
              << (checkpoints.path().empty() ? "Nothing is saved without --save DIR.\n"
                                             : "The run is saved, and goes on with --resume.\n");
  } else {
    double bits = std::numbers::log2e;
    std::cout << print(
        "\nLoss on the held-back text: %.4f before, %.4f after (%.2f and %.2f bits per byte)\n",
        *history.held_back_before,
        *history.held_back_after,
        *history.held_back_before * bits,
        *history.held_back_after * bits);
  }
  if (!history.sample.empty()) {
    std::cout << "\nThe model writes:\n\n" << printable(history.sample) << "\n";
  }
  std::cout << "\nReport:  " << options.report << "\nMetrics: " << options.out << "/metrics.jsonl\n";
  if (!checkpoints.path().empty()) {
    std::cout << "Saved:   " << checkpoints.path() << "\n";
  }
  if (!options.export_to.empty() && !history.interrupted) {
    std::cout << "Weights: " << options.export_to << "\n";
  }
  std::cout << std::flush;
}

/// Where the run stands: at a checkpoint, at weights that were made elsewhere, or at random ones.
void find_beginning(const Options& options, Checkpoints& checkpoints, Trainer& trainer, History& history) {
  if (!options.init_from.empty() && checkpoints.path().empty()) {
    import_weights(options.init_from, trainer.model());
  }
  checkpoints.resume(trainer, history);
}

// A GPU for each rank of this host, or the CPU.
std::string choose_device(const Options& options) {
  const char* ranks_here = std::getenv("LOCAL_WORLD_SIZE");
  const bool too_many = ranks_here != nullptr && std::atoi(ranks_here) > torch::cuda::device_count();
  return options.device.empty() && too_many ? "cpu" : options.device;
}

void run(const Options& options) {
  fsdp::init({.backend = options.backend, .device = choose_device(options)});
  catch_interrupts();
  Team team = options.single ? Team::in_one_process(options.ranks) : Team::of_the_job();
  choose_threads(options, team);
  Text text = load_text(options.data);
  Batches batches(text.bytes, options.model.sequence, options.batch);
  team.expect_same(std::to_string(batches.fingerprint()), "text");

  Checkpoints checkpoints(options, batches, team);
  Trainer trainer(options, batches, team);
  History history = describe_run(options, text, batches, team);
  describe_model(trainer, team, history);
  find_beginning(options, checkpoints, trainer, history);
  MetricsFile metrics;
  if (team.leads()) {
    std::filesystem::create_directories(options.out);
    metrics = MetricsFile(options.out + "/metrics.jsonl");
  }

  if (!history.held_back_before) {
    history.held_back_before = held_back_loss(trainer.model(), batches, team, options.batch);
  }
  metrics.begin(history);
  train({options, team, trainer, checkpoints, metrics, history});
  if (!history.interrupted) {
    history.held_back_after = held_back_loss(trainer.model(), batches, team, options.batch);
    history.sample =
        options.sample > 0 ? write_sample(trainer.model(), {.bytes = options.sample, .seed = options.seed}) : "";
    if (!options.export_to.empty()) {
      export_weights(options.export_to, trainer.model());
    }
  }
  metrics.end(history);
  if (team.leads()) {
    write_report(history, options.report);
    conclude(options, checkpoints, history);
  }
  fsdp::barrier(); // a launcher may end the others as soon as one has ended
}

/// Before `fsdp::init`, which may need the options: whether this process is to complain for all.
bool first_of_launch() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* rank = std::getenv(name)) {
      return std::string(rank) == "0";
    }
  }
  return true;
}

} // namespace
} // namespace train_gpt

int main(int argc, char** argv) {
  try {
    auto options = train_gpt::parse_options(argc, argv);
    if (options.help) {
      std::cout << (train_gpt::first_of_launch() ? train_gpt::help_text() : "");
      return EXIT_SUCCESS;
    }
    train_gpt::run(options);
    fsdp::shutdown();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::string who = fsdp::is_initialized() ? "rank " + std::to_string(fsdp::rank()) + ": " : "";
    if (!who.empty() || train_gpt::first_of_launch()) {
      std::cerr << "train_gpt: " + who + error.what() + "\n"; // in one piece: other ranks write there too
    }
    return EXIT_FAILURE;
  }
}
