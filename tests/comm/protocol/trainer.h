#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

#include "comm/protocol/explorer.h"

namespace fsdp::testing {

constexpr int kMostRanks = 3;
constexpr int kUnits = 2;
constexpr int64_t kEach = 2; // elements of a unit that a rank keeps

/// One rank of a model of two units, each a parameter whose elements all are its version: how often it was written.
class Trainer {
 public:
  explicit Trainer(c10::ScalarType gathered_as = c10::kFloat);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  static int rank();
  void make(int number);
  void make_all();

  /// As a touch of a handle, which then points into the home until `release`.
  void gather(int number);
  void gather_all();
  /// As a unit that is gathered ahead.
  void start_gather(int number);
  void finish_gather(int number);
  /// Reads for the last time, after whatever the others may have done.
  void release();

  /// As operators of an optimizer.
  void write(int number);
  void write_all();
  void step(); ///< gathers and writes all

  /// The other ranks' slices get no gradients: whatever nobody announces leaves them as they are.
  void only_gradients_of(int rank);
  /// From here on shards may be written with no word to anybody.
  void end_backward();
  /// So they may from here on, until a gather.
  void show_new_shards();
  void write_unseen(int number);
  void write_all_unseen();

  void barrier();
  /// In another group, of another library.
  void foreign_barrier();
  /// Something of every rank's, in memory that is written and read once.
  void put_together();

  /// Posts gradients; `wait_for` the sums.
  std::unique_ptr<Work> reduce(at::Tensor& gradients);
  void wait_for(Work& work, const at::Tensor& gradients);
  /// The same of gradients that others read where they lie, of which each rank adds up its own: other ones each time.
  void reduce_scatter();

  /// This rank tells the others to end when it comes to that operation.
  void abort_at(int operation);

 private:
  struct Unit {
    std::shared_ptr<Home> home;
    std::unique_ptr<Gathered> gathered;
    float version = 1;
    float unseen = 0; // of these changes, were with no word
  };

  Unit& unit(int number);
  void begin_operation();
  bool gets_gradients(int of) const;
  float version_of(const Unit& unit, int of) const;
  void read(int number);
  void change(int number, bool seen = true);
  void fill(Unit& unit) const;
  void let_go(int number);

  const Label label_{"test", "unit"};
  c10::ScalarType gathered_as_;
  std::shared_ptr<Group> group_;
  std::array<Unit, kUnits> units_;
  int barriers_ = 0;
  int reductions_ = 0; // on their way
  int scattered_ = 0;
  int operations_ = 0;
  int abort_at_ = -1;
  int only_ = -1; // rank that gets gradients; all if negative
};

using Program = std::function<void(Trainer&)>;

/// A model of two units, on which every rank runs `program`.
void expect_right(const Program& program, const ExplorerOptions& options = {});
/// So that the explorer says `what`.
void expect_found(
    const Mistake& mistake, const std::string& what, const Program& program, ExplorerOptions options = {});

} // namespace fsdp::testing
