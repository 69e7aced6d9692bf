#include "checkpoint/contents.h"

#include <algorithm>

#include <c10/util/accumulate.h>

#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "checkpoint/names_in_index.h"
#include "checkpoint/random_state.h"

namespace fsdp::disk {

namespace {

// Without elements a rank may have another number of steps, or none.
bool is_updated_here(const ShardedOptimStateDict::ParamState& state) {
  return state.tensors.empty() || std::any_of(state.tensors.begin(), state.tensors.end(), [](const auto& item) {
           return item.second.extent.numel() > 0 || c10::multiply_integers(item.second.sizes) == 0;
         });
}

void check_whole(const std::string& name, const at::Tensor& extra) {
  FSDP_CHECK(extra.defined(), "[save] extra '{}' is a tensor that was never given a value: leave it out", name);
  FSDP_CHECK(
      !is_sharded(extra),
      "[save] extra '{}' is a shard, of which each rank has another piece: give sharded(tensor).full_tensor(), on all "
      "ranks",
      name);
}

} // namespace

Contents::Contents(int rank, int64_t step, const StateOfRank& state, const Seats& seats)
    : rank_(rank), turns_(rank == 0, seats) {
  numbers_.step = step;
  for (const auto& item : state.model) {
    add(kModel + item.key(), item.value(), /*by_operators=*/false);
  }
  if (state.optimizer) {
    add(*state.optimizer);
  }
  add_random_states(state);
  if (rank_ == 0) {
    add_extra(state);
  }
}

void Contents::add(const std::string& name, const HeldTensor& held, bool by_operators) {
  pieces_.push_back({name, held, turns_.is_mine(held), by_operators});
}

void Contents::add(const ShardedOptimStateDict& optimizer) {
  auto& numbers = numbers_.optimizer.emplace();
  for (const auto& item : optimizer.state) {
    for (const auto& [key, tensor] : item.value().tensors) {
      FSDP_CHECK(
          key.find('/') == std::string::npos,
          "[save] '{}' of '{}' has a '/' in its name, after which it could not be loaded: name it otherwise",
          key,
          item.key());
      add(optimizer_name(item.key(), key), tensor, /*by_operators=*/true);
    }
    if (is_updated_here(item.value())) {
      numbers.of_params[item.key()] = item.value().scalars;
    }
  }
  for (const auto& group : optimizer.param_groups) {
    numbers.groups.push_back({group.params, group.options});
  }
}

void Contents::add_random_states(const StateOfRank& state) {
  for (const auto& [device, random_state] : random_states(state.device)) {
    pieces_.push_back({random_name(rank_, device), held(random_state), /*written_here=*/true});
  }
}

void Contents::add_extra(const StateOfRank& state) {
  for (const auto& [name, value] : state.extra) {
    if (value.isTensor()) {
      check_whole(name, value.toTensor());
      pieces_.push_back({kExtra + name, held(value.toTensor()), /*written_here=*/true});
    } else {
      numbers_.extra[name] = value.deepcopy(); // lists are shared with the program
    }
  }
}

} // namespace fsdp::disk
