#include <algorithm>
#include <utility>

#include "base/check.h"
#include "comm/arguments.h"
#include "comm/shm/core.h"

namespace fsdp::shm {
namespace {

class ShmGroup final : public Group {
 public:
  explicit ShmGroup(CorePointer core)
      : Group(core->members->rank(), core->members->size(), "shm"), core_(std::move(core)) {}

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    return shm::make_home(core_, std::move(pieces), options, label);
  }

  bool gathers_in_place() const override {
    return true;
  }

  void begin_unseen_writes(const ExpectedWrites& expected, const Label& label) override {
    core_->unseen_writes.begin(expected, label);
  }

  void end_unseen_writes() override {
    core_->unseen_writes.end();
  }

  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    return shm::reduce_scatter(core_, std::move(args), label);
  }

  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    announce_write(tensor);
    return shm::all_reduce(core_, std::move(tensor), op, divide_by, label);
  }

  void broadcast(at::Tensor tensor, int root, const Label& label) override {
    announce_write(tensor);
    shm::broadcast(core_, tensor, root, label);
  }

  void barrier(const Label& label) override {
    shm::exchange(core_, "", label);
  }

  std::vector<std::string> exchange(const std::string& bytes, const Label& label) override {
    return shm::exchange(core_, bytes, label);
  }

  std::shared_ptr<Group> split(int color, const Label& label) override;

  void abort(const std::string& reason) override {
    core_->members->mark_failed(reason);
  }

 private:
  CorePointer core_;
};

std::shared_ptr<Group> ShmGroup::split(int color, const Label& label) {
  const auto members = ranks_of_color(*this, color, label);
  // All ranks join some group now, so all take part in each exchange.
  const auto among_members = [&](const std::string& mine) {
    const auto all = exchange(mine, label);
    std::vector<std::string> chosen;
    for (const int r : members) {
      chosen.push_back(all[static_cast<size_t>(r)]);
    }
    return chosen;
  };
  const Members& parent = *core_->members;
  const int size = static_cast<int>(members.size());
  const auto new_rank = std::find(members.begin(), members.end(), rank()) - members.begin();
  CorePointer core;
  const auto complaint = complaint_of([&] {
    core = join({static_cast<int>(new_rank), size, parent.place().timeout, parent.family()}, among_members);
  });
  agree(exchange(complaint, label)); // ranks of the other parts, too
  return size == 1 ? group_of_one() : std::make_shared<ShmGroup>(std::move(core));
}

} // namespace
} // namespace fsdp::shm

namespace fsdp {

std::shared_ptr<Group> shm_group(int rank, int size, const Exchange& exchange, const ShmOptions& options) {
  FSDP_CHECK(
      rank >= 0 && rank < size, "[join shared-memory group] expected a rank from 0 to {}, got {}", size - 1, rank);
  auto family = std::make_shared<shm::Family>();
  family->ranks_on_host = size;
  return std::make_shared<shm::ShmGroup>(
      shm::join({rank, size, options.timeout, std::move(family)}, exchange, options.arena));
}

} // namespace fsdp
