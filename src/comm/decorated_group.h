#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/group.h>

namespace fsdp {

/// Does what `base` does: for groups that differ from another in one thing.
class DecoratedGroup : public Group {
 public:
  explicit DecoratedGroup(std::shared_ptr<Group> base)
      : Group(base->rank(), base->size(), base->name()), base_(std::move(base)) {}

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    return base_->make_home(std::move(pieces), options, label);
  }
  bool gathers_in_place() const override {
    return base_->gathers_in_place();
  }
  void begin_unseen_writes(const ExpectedWrites& expected, const Label& label) override {
    base_->begin_unseen_writes(expected, label);
  }
  void end_unseen_writes() override {
    base_->end_unseen_writes();
  }
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    return base_->reduce_scatter(std::move(args), label);
  }
  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    return base_->all_reduce(std::move(tensor), op, divide_by, label);
  }
  void broadcast(at::Tensor tensor, int root, const Label& label) override {
    base_->broadcast(std::move(tensor), root, label);
  }
  void barrier(const Label& label) override {
    base_->barrier(label);
  }
  std::vector<std::string> exchange(const std::string& bytes, const Label& label) override {
    return base_->exchange(bytes, label);
  }
  std::shared_ptr<Group> split(int color, const Label& label) override {
    return base_->split(color, label);
  }
  void abort(const std::string& reason) override {
    base_->abort(reason);
  }

 protected:
  std::shared_ptr<Group> base_;
};

} // namespace fsdp
