#include "comm/custom_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "base/view_into.h"
#include "comm/arguments.h"
#include "comm/copy_each.h"
#include "comm/decorated_group.h"
#include "comm/payload.h"
#include "comm/queued.h"
#include "comm/rank_major.h"
#include "comm/reduce.h"

namespace fsdp {

namespace {

using Collective = std::function<void(at::Tensor&, const at::Tensor&, Group&)>;

/// All of a group but the collective that a user brings.
class WithCollective : public DecoratedGroup {
 public:
  WithCollective(std::shared_ptr<Group> base, Collective collective)
      : DecoratedGroup(std::move(base)), collective_(std::move(collective)) {}

 protected:
  Collective collective_;
};

/// Slices in memory of this rank, padded so that every rank sends the same.
class FlatHome final : public Home {
 public:
  FlatHome(std::shared_ptr<Group> group, Collective collective, std::vector<Piece> pieces, const HomeOptions& options)
      : group_(std::move(group)),
        collective_(std::move(collective)),
        plan_(std::move(pieces), group_->size(), options.device),
        memory_(at::zeros({plan_.stored.bytes}, bytes_on(options.offload ? c10::kCPU : options.device))) {}

  void* slice(size_t index) const override {
    return static_cast<char*>(memory_.mutable_data_ptr()) + plan_.stored.slots[index].offset;
  }
  void begin_write(const Label&) override {}

  std::unique_ptr<Gathered> gather(const Label&) override {
    const at::Tensor copy = memory_.to(plan_.device, /*non_blocking=*/false, /*copy=*/!plan_.casts);
    const at::Tensor sent = plan_.casts ? plan_.cast(copy) : copy; // users may write to what they are given
    const at::Tensor rows = at::empty({plan_.size, plan_.sent.bytes}, sent.options());
    for (const auto& run : plan_.sent.runs) {
      gather(run, sent, rows);
    }
    const at::Tensor wholes = at::empty({plan_.wholes.bytes}, sent.options());
    if (plan_.sent.bytes > 0) {
      plan_.copy_out(rows, wholes);
    }
    std::vector<at::Tensor> pieces;
    for (size_t i = 0; i < plan_.pieces.size(); ++i) {
      pieces.push_back(view_into(wholes, at::kByte, plan_.sent.slots[i].bytes * plan_.size, plan_.wholes.offsets[i]));
    }
    return std::make_unique<CopiedOut>(std::move(pieces), plan_.device, plan_.wholes.bytes);
  }

 private:
  static at::TensorOptions bytes_on(c10::Device device) {
    return at::TensorOptions().dtype(at::kByte).device(device);
  }

  void gather(const Payload::Run& run, const at::Tensor& sent, const at::Tensor& rows) {
    const at::Tensor input = sent.narrow(0, run.offset, run.bytes).view(run.dtype);
    at::Tensor output = at::empty({plan_.size * input.numel()}, input.options());
    collective_(output, input, *group_);
    rows.narrow(1, run.offset, run.bytes).copy_(output.view({plan_.size, -1}).view(at::kByte));
  }

  std::shared_ptr<Group> group_;
  Collective collective_;
  GatherPlan plan_;
  at::Tensor memory_;
};

class OtherAllGather final : public WithCollective {
 public:
  using WithCollective::WithCollective;
  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    check_pieces(pieces, size(), label);
    return std::make_shared<FlatHome>(base_, collective_, std::move(pieces), options);
  }
  bool gathers_in_place() const override {
    return false;
  }
  void begin_unseen_writes(const ExpectedWrites&, const Label&) override {}
  void end_unseen_writes() override {}
};

class OtherReduceScatter final : public WithCollective {
 public:
  using WithCollective::WithCollective;
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    check_reduce_scatter(args, rank(), size(), label);
    const RankMajor layout(args, rank(), size());
    const c10::Device device = args.wholes.empty() ? c10::Device(c10::kCPU) : args.wholes[0].device();
    if (layout.row() > 0) {
      const at::Tensor input = at::empty({size() * layout.row()}, args.wholes[0].options());
      layout.pack(args, input);
      at::Tensor output = at::empty({layout.row()}, input.options());
      collective_(output, input, *base_);
      divide_(output, args.divide_by);
      copy_out(output, layout.offsets(), args.slices);
    }
    return std::make_unique<Queued>(device);
  }
};

} // namespace

std::shared_ptr<Group> with_all_gather(std::shared_ptr<Group> group, Collective all_gather) {
  return std::make_shared<OtherAllGather>(std::move(group), std::move(all_gather));
}

std::shared_ptr<Group> with_reduce_scatter(std::shared_ptr<Group> group, Collective reduce_scatter) {
  return std::make_shared<OtherReduceScatter>(std::move(group), std::move(reduce_scatter));
}

} // namespace fsdp
