#pragma once

#include <sstream>

#include "nn/parity.h"
#include "nn/random_model.h"

/// What a random trial does, drawn before anything is run.
namespace fsdp::testing::random {

/// Something between two steps.
enum class What {
  kEvaluate,
  kBreakForward,
  kBreakBackward,
  kDropLoss,
  kClone,
  kSummon,
  kWriteShards,
  kWriteShardsRaw,
  kWriteMember,
  kLookAlone,
  kReadWhole,
  kFreeze,
  kToDouble,
  kReplaceShards,
  kUnshard,
  kFork,
};
inline const char* name_of(What what) {
  static constexpr const char* names[] = {
      "evaluate",
      "break a forward",
      "break a backward",
      "drop a loss",
      "clone",
      "summon",
      "write shards",
      "write shards raw",
      "write a member",
      "look alone",
      "read whole",
      "freeze or thaw",
      "to double",
      "replace shards",
      "unshard",
      "fork"};
  return names[static_cast<int>(what)];
}

struct Event {
  What what = What::kEvaluate;
  int choice = 0; ///< of one of several, and of ways to do it
};

enum class Loss { kPlain, kTwo, kRetained, kForwardForward, kPenaltyOnInput, kPenaltyOnWeights };
inline const char* name_of(Loss loss) {
  static constexpr const char* names[] = {
      "plain",
      "two losses",
      "retained graph",
      "forward forward backward backward",
      "penalty on input",
      "penalty on weights"};
  return names[static_cast<int>(loss)];
}

struct Micro {
  Loss loss = Loss::kPlain;
  bool syncs = true;
  bool all_reduces = true;
  bool is_last = true;
};

enum class Optimizer { kOperators, kRaw, kAdamW };

struct StepPlan {
  std::vector<Event> before;
  std::vector<Micro> micros;
  bool looks = false; ///< one rank looks at layers in the midst of it
  bool keeps_gradients = false; ///< for the next step to add to
  bool zeroes_gradients = false; ///< and does not forget them
};

struct UnitPlan {
  std::vector<int> modules; ///< of `modules_of` the model
  ReshardAfterForward reshard;
  std::vector<int> forward_prefetch, backward_prefetch; ///< of the units
};

struct Program {
  uint64_t seed = 0;
  Arrangement arrangement{1};
  int64_t width = 4;
  std::vector<Part> parts;
  std::vector<int> frozen; ///< of the model's parameters
  std::vector<UnitPlan> units; ///< children first, the root last
  MixedPrecisionPolicy precision;
  bool offload = false;
  bool last_dims = false; ///< cut
  bool zeros = false; ///< for unused parameters
  bool stays_whole = false; ///< after backward
  bool separate_group = false;
  bool ranks_differ = false; ///< in the units they use
  int companions = 0; ///< other models that are trained in between, each over its part of the ranks
  bool turns_differ = false; ///< some ranks use them first, others the model: over groups of their own
  std::optional<nn::FlatCut> flat = std::nullopt;
  int in_flight = 1;
  double divisor = 0; ///< the number of ranks, if 0
  Optimizer optimizer = Optimizer::kOperators;
  bool plain_steps = false; ///< which leave as it is whatever gets no gradient
  std::vector<StepPlan> steps;
  /// What several checkpointed segments use may be reduced in several parts.
  bool differs_by_roundings = false;

  std::string str() const;
};

inline const char* name_of(Optimizer optimizer) {
  static constexpr const char* names[] = {"operators", "raw writes", "AdamW"};
  return names[static_cast<int>(optimizer)];
}

inline std::string str_of(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : " ") + std::to_string(number);
  }
  return "{" + text + "}";
}

inline std::string Program::str() const {
  std::ostringstream out;
  out << "seed " << seed << ": " << arrangement.replicas << " x " << arrangement.shards << " ranks, width " << width;
  for (size_t i = 0; i < parts.size(); ++i) {
    out << "\n  #" << i << " " << parts[i].str();
  }
  out << "\n  frozen " << str_of(frozen) << (offload ? ", offload" : "") << (last_dims ? ", last dimensions" : "")
      << (flat ? ", flat" : "") << (flat ? " " + std::to_string(flat->alignment) : "")
      << (flat && flat->shown_as_one ? " as one" : "") << (zeros ? ", zeros" : "")
      << (stays_whole ? ", stays whole" : "") << (separate_group ? ", separate group" : "")
      << (companions > 0 ? ", companions " + std::to_string(companions) : "") << (turns_differ ? " in other turns" : "")
      << ", in flight " << in_flight << ", divisor " << divisor << ", " << name_of(optimizer)
      << (plain_steps ? ", plain" : "");
  for (const auto& [label, dtype] : {std::pair{"param", precision.param_dtype}, {"reduce", precision.reduce_dtype}}) {
    out << (dtype ? std::string(", ") + label + " " + c10::toString(*dtype) : "");
  }
  for (const auto& unit : units) {
    out << "\n  unit of modules " << str_of(unit.modules) << " reshard "
        << (unit.reshard.ranks() ? std::to_string(*unit.reshard.ranks())
                                 : (unit.reshard.reshard() ? std::to_string(*unit.reshard.reshard()) : "unset"))
        << " prefetch " << str_of(unit.forward_prefetch) << str_of(unit.backward_prefetch);
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const auto& event : steps[i].before) {
      out << "\n  " << name_of(event.what) << " (" << event.choice << ")";
    }
    out << "\n  step " << i << (steps[i].looks ? ", looks" : "")
        << (steps[i].keeps_gradients ? ", keeps gradients" : "") << (steps[i].zeroes_gradients ? ", zeroes them" : "");
    for (const auto& micro : steps[i].micros) {
      out << "; " << name_of(micro.loss) << (micro.syncs ? "" : ", no sync")
          << (micro.all_reduces ? "" : ", no all-reduce") << (micro.is_last ? "" : ", not the last");
    }
  }
  return out.str();
}

/// Each once, the model first.
inline std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const torch::nn::Module& model) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::unordered_set<const torch::nn::Module*> seen;
  for (const auto& module : model.modules()) {
    const bool is_ours = dynamic_cast<LeafImpl*>(module.get()) || dynamic_cast<BlockImpl*>(module.get());
    if (is_ours && seen.insert(module.get()).second) {
      modules.push_back(module);
    }
  }
  return modules;
}

/// What the ranks and their device can do.
struct Limits {
  int most_ranks = 4;
  bool on_host = true;
  bool flat = false; ///< units are cut as one
};

class Drawing {
 public:
  Drawing(uint64_t seed, const Limits& limits) : draw_(seed), limits_(limits) {
    program_.seed = seed;
  }

  Program program() {
    draw_arrangement();
    draw_options();
    draw_cut();
    draw_model();
    draw_units();
    const int steps = 2 + draw_.below(4);
    for (int i = 0; i < steps; ++i) {
      draw_step();
    }
    if (limits_.on_host && draw_.chance(30)) {
      program_.companions = program_.arrangement.ranks() % 2 == 0 && draw_.chance(50) ? 2 : 1;
      program_.turns_differ = may_look_alone() && draw_.chance(70);
    }
    return program_;
  }

 private:
  void draw_arrangement() {
    const int ranks = 1 + draw_.below(limits_.most_ranks);
    const int replicas = ranks % 2 == 0 && draw_.chance(35) ? (draw_.chance(30) ? ranks : 2) : 1;
    program_.arrangement = {.shards = ranks / replicas, .replicas = replicas};
    program_.width = draw_.one_of<int64_t>({3, 4, 5, 8});
  }

  void draw_options() {
    auto& precision = program_.precision;
    if (draw_.chance(25)) {
      precision.param_dtype = torch::kBFloat16;
      precision.reduce_dtype = draw_.one_of<c10::ScalarType>({torch::kFloat, kShardDtype});
    } else if (draw_.chance(15)) {
      precision.reduce_dtype = torch::kDouble;
    }
    program_.offload = draw_.chance(20);
    program_.last_dims = draw_.chance(20);
    program_.zeros = draw_.chance(25);
    program_.stays_whole = draw_.chance(20);
    program_.separate_group = draw_.chance(15);
    program_.in_flight = 1 + draw_.below(3);
    program_.divisor = draw_.chance(25) ? 3 : 0;
    program_.optimizer = draw_.one_of<Optimizer>({Optimizer::kOperators, Optimizer::kAdamW});
    if (draw_.chance(35)) {
      program_.optimizer = Optimizer::kRaw;
    }
    program_.plain_steps = draw_.chance(40);
  }

  void draw_cut() {
    if (limits_.flat) {
      program_.flat = nn::FlatCut{.alignment = draw_.chance(50) ? 16 : 1, .shown_as_one = draw_.chance(50)};
      program_.last_dims = false;
    }
  }
  bool is_shown_as_one() const {
    return program_.flat && program_.flat->shown_as_one;
  }

  bool casts() const {
    return program_.precision.param_dtype.has_value();
  }
  /// A gather that asks nobody.
  bool may_look_alone() const {
    return limits_.on_host && !casts();
  }

  void draw_model() {
    Grammar grammar;
    grammar.kinds = {
        Kind::kLinear,
        Kind::kLinear,
        Kind::kFunction,
        Kind::kWeightAlone,
        Kind::kPieces,
        Kind::kRow,
        Kind::kMean,
        Kind::kScalar,
        Kind::kNorm,
        Kind::kEmbedding,
        Kind::kTiedEmbedding};
    grammar.calls = {Call::kTwice, Call::kNoGradFirst, Call::kLookedAt, Call::kCheckpointed};
    if (limits_.on_host) {
      grammar.kinds.insert(
          grammar.kinds.end(), {Kind::kConvolution, Kind::kLstm, Kind::kGru, Kind::kAttention, Kind::kNorm});
    } else {
      grammar.calls.push_back(Call::kBeside);
    }
    if (!casts()) {
      grammar.kinds.push_back(Kind::kBatchNorm);
    }
    grammar.ranks_differ = program_.zeros && may_look_alone() && draw_.chance(60);
    program_.parts = draw_parts(draw_, grammar);
    // A rank that uses nothing that is trained does not know of a step.
    program_.parts.insert(program_.parts.begin(), Part{});
    for (auto& part : program_.parts) {
      part.again += part.again < 0 ? 0 : 1;
    }
    has_other_uses_ = any_part(program_.parts, [](const Part& part) {
      return part.again >= 0 || part.call == Call::kTwice || part.call == Call::kNoGradFirst;
    });
    program_.ranks_differ = grammar.ranks_differ;
    has_checkpoints_ = any_part(program_.parts, [](const Part& part) { return part.call == Call::kCheckpointed; });
    has_same_weights_ = any_part(program_.parts, [](const Part& part) { return part.kind == Kind::kSameWeight; });
    model_ = std::make_shared<BlockImpl>(program_.parts, program_.width);
    if (has_checkpoints_ && has_other_uses_) {
      if (casts()) { // bfloat16 would make more of a rounding
        take_checkpoints_away(program_.parts);
        has_checkpoints_ = false;
      }
      program_.differs_by_roundings = has_checkpoints_;
    }
    const int share = is_shown_as_one() ? 0 : draw_.one_of<int>({0, 0, 20, 50}); // as one, or not at all
    for (int i = 0; i < static_cast<int>(model_->named_parameters().size()); ++i) {
      if (draw_.chance(share) && !(program_.zeros && i < 2)) {
        program_.frozen.push_back(i);
      }
    }
  }

  static void take_checkpoints_away(std::vector<Part>& parts) {
    for (auto& part : parts) {
      part.call = part.call == Call::kCheckpointed ? Call::kOnce : part.call;
      take_checkpoints_away(part.parts);
    }
  }

  ReshardAfterForward draw_reshard() {
    std::vector<int> fewer;
    for (int i = 1; i <= program_.arrangement.shards; ++i) {
      if (program_.arrangement.shards % i == 0) {
        fewer.push_back(i);
      }
    }
    switch (draw_.below(4)) {
      case 0:
        return true;
      case 1:
        return false;
      case 2:
        return draw_.one_of(fewer);
      default:
        return {};
    }
  }

  void draw_units() {
    const int share = draw_.one_of<int>({0, 30, 60, 95});
    const auto reshard = draw_reshard();
    const bool each_its_own = draw_.chance(30);
    const auto options = [&] { return each_its_own ? draw_reshard() : reshard; };
    const auto modules = modules_of(*model_);
    int waiting = -1; // for a second module of its unit
    for (int i = static_cast<int>(modules.size()) - 1; i > 0; --i) {
      if (!draw_.chance(share)) {
        continue;
      }
      const bool is_leaf = dynamic_cast<LeafImpl*>(modules[static_cast<size_t>(i)].get()) != nullptr;
      waiting = is_leaf ? waiting : -1; // children come first
      if (is_leaf && waiting < 0 && draw_.chance(15)) {
        waiting = i;
      } else if (is_leaf && waiting >= 0) {
        program_.units.push_back({{waiting, i}, options(), {}, {}});
        waiting = -1;
      } else {
        program_.units.push_back({{i}, options(), {}, {}});
      }
    }
    program_.units.push_back({{0}, options(), {}, {}});
    const int count = static_cast<int>(program_.units.size());
    for (auto& unit : program_.units) {
      if (draw_.chance(12)) {
        unit.forward_prefetch = {draw_.below(count), draw_.below(count)};
        unit.backward_prefetch = {draw_.below(count)};
      }
    }
  }

  void draw_step() {
    StepPlan step;
    while (draw_.chance(45)) {
      step.before.push_back(draw_event());
    }
    step.looks = may_look_alone() && draw_.chance(40);
    step.keeps_gradients = draw_.chance(10);
    step.zeroes_gradients = draw_.chance(10);
    const int micros = 1 + draw_.below(3);
    const int how = draw_.below(3);
    for (int i = 0; i < micros; ++i) {
      const bool last = i + 1 == micros;
      step.micros.push_back(
          {.loss = draw_loss(),
           .syncs = last || how != 1,
           .all_reduces = last || how != 2,
           .is_last = last || draw_.chance(70)});
    }
    program_.steps.push_back(step);
  }

  Loss draw_loss() {
    if (draw_.chance(45)) {
      return Loss::kPlain;
    }
    std::vector<Loss> losses{Loss::kTwo, Loss::kForwardForward};
    if (!has_checkpoints_) {
      losses.push_back(Loss::kRetained);
    }
    if (!has_checkpoints_ && (limits_.on_host || !casts())) {
      losses.insert(losses.end(), {Loss::kPenaltyOnInput, Loss::kPenaltyOnWeights});
    }
    return draw_.one_of(losses);
  }

  Event draw_event() {
    std::vector<What> choices{
        What::kEvaluate,
        What::kEvaluate,
        What::kDropLoss,
        What::kSummon,
        What::kWriteShards,
        What::kWriteMember,
        What::kReadWhole,
        What::kUnshard,
        What::kReplaceShards};
    if (!program_.zeros && program_.optimizer != Optimizer::kRaw && !is_shown_as_one()) {
      choices.push_back(What::kFreeze);
    }
    if (!program_.ranks_differ) { // all have to break in the same place
      choices.insert(choices.end(), {What::kBreakForward, What::kBreakBackward});
    }
    choices.push_back(What::kWriteShardsRaw);
    if (limits_.on_host && !is_shown_as_one()) { // recurrent modules lose what is hidden
      choices.push_back(What::kToDouble);
    }
    if (!has_same_weights_ && !program_.flat) {
      choices.push_back(What::kClone);
    }
    if (may_look_alone()) {
      choices.push_back(What::kLookAlone);
    }
    if (limits_.on_host) {
      choices.push_back(What::kFork);
    }
    return {draw_.one_of(choices), draw_.below(1 << 20)};
  }

  Draw draw_;
  Limits limits_;
  Program program_;
  std::shared_ptr<BlockImpl> model_;
  bool has_checkpoints_ = false, has_same_weights_ = false, has_other_uses_ = false;
};

inline Program draw_program(uint64_t seed, const Limits& limits) {
  return Drawing(seed, limits).program();
}

} // namespace fsdp::testing::random
