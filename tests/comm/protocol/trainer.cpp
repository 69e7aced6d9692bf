#include "comm/protocol/trainer.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp::testing {
namespace {

std::array<std::array<bool, kMostRanks>, kUnits> readers; // who reads a unit in place just now

bool& reads(int number, int rank) {
  return readers.at(static_cast<size_t>(number)).at(static_cast<size_t>(rank));
}

std::string of_rank(int rank) {
  return "rank " + std::to_string(rank);
}

} // namespace

Trainer::Trainer(c10::ScalarType gathered_as) : gathered_as_(gathered_as) {
  readers = {};
  group_ =
      shm_group(rank(), exploring::ranks(), &exploring::exchange, {.timeout = std::chrono::hours(1), .arena = false});
}

Trainer::~Trainer() {
  exploring::operation(std::uncaught_exceptions() > 0);
  for (int number = 0; number < kUnits; ++number) {
    let_go(number);
  }
}

int Trainer::rank() {
  return exploring::rank();
}

Trainer::Unit& Trainer::unit(int number) {
  return units_.at(static_cast<size_t>(number));
}

void Trainer::make(int number) {
  Unit& made = unit(number);
  made.home = group_->make_home({{kEach * exploring::ranks(), kEach, c10::kFloat, gathered_as_}}, {}, label_);
  made.home->begin_write(label_);
  fill(made);
  made.home->gather(label_)->wait();
}

void Trainer::make_all() {
  make(0);
  make(1);
}

void Trainer::begin_operation() {
  exploring::operation(reductions_ > 0);
  if (operations_++ == abort_at_) {
    group_->abort("it has had enough");
    throw CommError("had enough");
  }
}

void Trainer::abort_at(int operation) {
  abort_at_ = operation;
}

// -- reading

void Trainer::gather(int number) {
  start_gather(number);
  finish_gather(number);
}

void Trainer::gather_all() {
  gather(0);
  gather(1);
}

void Trainer::start_gather(int number) {
  begin_operation();
  let_go(number);
  unit(number).gathered = unit(number).home->gather(label_);
}

void Trainer::finish_gather(int number) {
  unit(number).gathered->wait();
  reads(number, rank()) = gathered_as_ == c10::kFloat;
  read(number);
}

void Trainer::read(int number) {
  const void* memory = unit(number).gathered->piece(0);
  for (int64_t i = 0; i < kEach * exploring::ranks(); ++i) {
    const float value = gathered_as_ == c10::kFloat ? static_cast<const float*>(memory)[i]
                                                    : static_cast<float>(static_cast<const c10::BFloat16*>(memory)[i]);
    const auto of = static_cast<int>(i / kEach);
    const float expected = version_of(unit(number), of);
    if (value != expected) {
      exploring::violate(
          of_rank(rank()) + " read version " + std::to_string(static_cast<int>(value)) + " of " + of_rank(of) +
          "'s slice of unit " + std::to_string(number) + ", expected " + std::to_string(static_cast<int>(expected)));
    }
  }
}

void Trainer::release() {
  exploring::pause();
  for (int number = 0; number < kUnits; ++number) {
    if (unit(number).gathered) {
      read(number);
    }
    let_go(number);
  }
}

void Trainer::let_go(int number) {
  reads(number, rank()) = false;
  unit(number).gathered.reset();
}

// -- writing

void Trainer::write(int number) {
  begin_operation();
  release();
  unit(number).home->begin_write(label_);
  change(number);
}

void Trainer::write_all() {
  write(0);
  write(1);
}

void Trainer::step() {
  gather_all();
  write_all();
}

void Trainer::only_gradients_of(int rank) {
  only_ = rank;
}

bool Trainer::gets_gradients(int of) const {
  return only_ < 0 || of == only_;
}

void Trainer::end_backward() {
  begin_operation();
  release();
  ExpectedWrites expected{.certain = true, .changes = {}};
  if (gets_gradients(rank())) {
    expected.changes = {unit(0).home->slice(0)};
  }
  group_->begin_unseen_writes(expected, label_);
}

void Trainer::show_new_shards() {
  begin_operation();
  release();
  group_->begin_unseen_writes({}, label_);
}

void Trainer::write_unseen(int number) {
  begin_operation();
  exploring::pause();
  change(number, /*seen=*/false);
}

void Trainer::write_all_unseen() {
  write_unseen(0);
  write_unseen(1);
}

void Trainer::change(int number, bool seen) {
  Unit& changed = unit(number);
  changed.version += 1;
  changed.unseen += seen ? 0 : 1;
  if (!seen && !gets_gradients(rank())) {
    return;
  }
  for (int r = 0; r < exploring::ranks(); ++r) {
    if (r != rank() && reads(number, r)) {
      exploring::violate(
          of_rank(rank()) + " writes unit " + std::to_string(number) + " while " + of_rank(r) + " reads it");
    }
  }
  fill(changed);
}

float Trainer::version_of(const Unit& unit, int of) const {
  return unit.version - (gets_gradients(of) ? 0 : unit.unseen);
}

void Trainer::fill(Unit& unit) const {
  std::fill_n(static_cast<float*>(unit.home->slice(0)), kEach, version_of(unit, rank()));
}

// -- together

void Trainer::barrier() {
  begin_operation();
  const auto word = [this](int rank) { return std::to_string(barriers_) + "/" + std::to_string(rank); };
  ++barriers_;
  const auto all = group_->exchange(word(rank()), label_);
  for (int r = 0; r < exploring::ranks(); ++r) {
    if (all[static_cast<size_t>(r)] != word(r)) {
      exploring::violate(of_rank(rank()) + " was told " + all[static_cast<size_t>(r)]);
    }
  }
}

void Trainer::foreign_barrier() {
  begin_operation();
  exploring::exchange("");
}

void Trainer::put_together() {
  begin_operation();
  const auto home = group_->make_home({{exploring::ranks(), 1, c10::kFloat, c10::kFloat}}, {}, label_);
  home->begin_write(label_);
  *static_cast<float*>(home->slice(0)) = static_cast<float>(rank());
  const auto gathered = home->gather(label_);
  gathered->wait();
  for (int r = 0; r < exploring::ranks(); ++r) {
    if (static_cast<const float*>(gathered->piece(0))[r] != static_cast<float>(r)) {
      exploring::violate(of_rank(rank()) + " put together what is not " + of_rank(r) + "'s");
    }
  }
  group_->exchange("", label_);
}

std::unique_ptr<Work> Trainer::reduce(at::Tensor& gradients) {
  begin_operation();
  ++reductions_;
  gradients = at::full({kEach}, static_cast<double>(rank() + 1));
  return group_->all_reduce(gradients, ReduceOp::kSum, 1, label_);
}

void Trainer::wait_for(Work& work, const at::Tensor& gradients) {
  begin_operation();
  work.wait();
  --reductions_;
  const auto sum = static_cast<float>(exploring::ranks() * (exploring::ranks() + 1)) / 2;
  if (gradients.const_data_ptr<float>()[0] != sum) {
    exploring::violate(of_rank(rank()) + " has a wrong sum");
  }
}

void Trainer::reduce_scatter() {
  begin_operation();
  ++reductions_;
  const int ranks = exploring::ranks();
  const Cut cut{kEach * ranks, kEach};
  at::Tensor sums = at::zeros({kEach});
  const auto work = group_->reduce_scatter(
      {{at::full({kEach * ranks}, static_cast<double>(10 * scattered_ + rank() + 1))}, {cut}, {sums}}, label_);
  begin_operation();
  work->wait();
  --reductions_;
  const auto expected = static_cast<float>(10 * scattered_ * ranks + ranks * (ranks + 1) / 2);
  for (int64_t i = 0; i < kEach; ++i) {
    if (sums.const_data_ptr<float>()[i] != expected) {
      exploring::violate(of_rank(rank()) + " has a wrong sum of reduction " + std::to_string(scattered_));
    }
  }
  ++scattered_;
}

// -- exploring

namespace {

Explored explore_program(const Program& program, const ExplorerOptions& options) {
  return explore(options, [&] {
    Trainer me;
    me.make_all();
    exploring::start();
    program(me);
  });
}

} // namespace

void expect_right(const Program& program, const ExplorerOptions& options) {
  const Explored explored = explore_program(program, options);
  EXPECT_EQ(explored.violation, "");
  EXPECT_GT(explored.runs, 100); // that many orders at least
  EXPECT_EQ(explored.errors > 0, options.may_fail);
}

void expect_found(const Mistake& mistake, const std::string& what, const Program& program, ExplorerOptions options) {
  options.mistake = mistake;
  const Explored explored = explore_program(program, options);
  EXPECT_NE(explored.violation.find(what), std::string::npos) << explored.violation;
}

} // namespace fsdp::testing
