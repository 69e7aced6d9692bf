#include <cstring>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include "base/view_into.h"
#include "comm/c10d/over_channel.h"
#include "comm/copy_each.h"
#include "comm/queued.h"
#include "comm/rank_major.h"
#include "comm/reduce.h"

namespace fsdp::adapter {
namespace {

// Bytes of a row that stays in the first-level cache between its sum and the copies out of it.
constexpr int64_t kShortRow = 16 * 1024;
// So few bytes of rows may be mostly padding: the order of the sum stays the ranks' there.
constexpr int64_t kLittle = 64 * 1024;

/// Packs a matrix with one row per rank, and holds it and the wholes as long as the collective may read them.
class Packed : public StreamedWork {
 public:
  Packed(std::shared_ptr<Channel> channel, ReduceScatter args, RankMajor layout)
      : StreamedWork(args.wholes.front().device()),
        channel_(std::move(channel)),
        args_(std::move(args)),
        layout_(std::move(layout)),
        matrix_(layout_.as_it_is(args_)) {
    if (!matrix_.defined()) {
      packed_ = take(layout_.row() * channel_->size());
      matrix_ = typed(packed_, layout_.row() * channel_->size());
      layout_.pack(args_, matrix_);
      if (matrix_.device().is_cpu()) {
        args_.wholes.clear(); // copied; a device still has to do that
      }
    }
  }

 protected:
  c10::ScalarType dtype() const {
    return matrix_.scalar_type();
  }

  at::Tensor take(int64_t count) {
    const auto& like = args_.slices.front();
    return channel_->pool().take(count * like.element_size(), like.device());
  }

  at::Tensor typed(const at::Tensor& bytes, int64_t count) const {
    return view_into(bytes, args_.slices.front().scalar_type(), count);
  }

  void release() {
    matrix_.reset();
    args_.wholes.clear();
    channel_->pool().give_back(std::exchange(packed_, at::Tensor()));
  }

  std::shared_ptr<Channel> channel_;
  ReduceScatter args_;
  RankMajor layout_;
  at::Tensor packed_; // from the pool
  at::Tensor matrix_; // `packed_`, or the only whole itself
};

/// The backend sums.
class BackendSum final : public Packed {
 public:
  BackendSum(std::shared_ptr<Channel> channel, ReduceScatter args, RankMajor layout, const Label& label)
      : Packed(std::move(channel), std::move(args), std::move(layout)),
        division_(args_.divide_by, dtype(), /*sum_may_overflow=*/true),
        memory_(take(layout_.row())),
        sums_(typed(memory_, layout_.row())) {
    divide_(matrix_, division_.before);
    pending_ = channel_->start(label, "reduce-scatter", sums_.device(), matrix_.nbytes(), [&](Collectives& c) {
      return c.reduce_scatter(sums_, matrix_);
    });
  }

 private:
  void conclude() override {
    release();
    divide_(sums_, division_.after);
    copy_out(sums_, layout_.offsets(), args_.slices);
    channel_->pool().give_back(std::exchange(memory_, at::Tensor()));
  }

  Division division_;
  at::Tensor memory_; // from the pool
  at::Tensor sums_;
};

/// Every rank sends each other its row and sums what it got. On the host: Gloo's own reduce-scatter is an all-reduce,
/// which moves and adds `size` times as much. The order of the sum is the ranks', so the bits do not depend on the
/// backend's algorithm.
class HostSum final : public Packed {
 public:
  HostSum(std::shared_ptr<Channel> channel, ReduceScatter args, RankMajor layout, const Label& label)
      : Packed(std::move(channel), std::move(args), std::move(layout)),
        received_(take(layout_.row() * channel_->size())) {
    const auto bytes = static_cast<int64_t>(matrix_.nbytes());
    const at::Tensor output = view_into(received_, at::kByte, bytes);
    const at::Tensor input = view_into(matrix_, at::kByte, bytes);
    pending_ = channel_->start(
        label, "reduce-scatter", c10::kCPU, bytes, [&](Collectives& c) { return c.all_to_all(output, input); });
  }

 private:
  void conclude() override {
    release();
    layout_.row() * item() <= kShortRow ? sum_rows() : sum_slices();
    channel_->pool().give_back(std::exchange(received_, at::Tensor()));
  }

  // What a sum costs to begin with would be more than the copies.
  void sum_rows() {
    const at::Tensor sums = typed(received_, layout_.row()); // in place of the first row
    reduce(sums, rows_from(0), ReduceOp::kSum, args_.divide_by);
    copy_out(sums, layout_.offsets(), args_.slices);
  }

  void sum_slices() {
    for (size_t i = 0; i < args_.slices.size(); ++i) {
      reduce(args_.slices[i], rows_from(layout_.offsets()[i]), ReduceOp::kSum, args_.divide_by);
    }
  }

  int64_t item() const {
    return args_.slices.front().element_size();
  }

  // Where each rank's numbers lie, from one in its row on.
  std::vector<const void*> rows_from(int64_t offset) const {
    const char* const from = static_cast<const char*>(received_.const_data_ptr()) + offset * item();
    return rows_of(from, layout_.row() * item(), channel_->size());
  }

  at::Tensor received_; // from the pool; row r came from rank r
};

/// The backend sums the wholes for all ranks, and each takes its slices.
class WholeSum final : public StreamedWork {
 public:
  WholeSum(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label)
      : StreamedWork(args.wholes.front().device()),
        channel_(std::move(channel)),
        args_(std::move(args)),
        division_(args_.divide_by, args_.slices.front().scalar_type(), /*sum_may_overflow=*/true) {
    int64_t end = 0;
    for (size_t i = 0; i < args_.wholes.size(); ++i) {
      const int64_t numel = args_.wholes[i].numel();
      begins_.push_back(end + args_.cuts[i].begin(channel_->rank()));
      end += numel;
    }
    const at::Tensor& like = args_.wholes.front();
    memory_ = channel_->pool().take(end * like.element_size(), like.device());
    sums_ = view_into(memory_, like.scalar_type(), end);
    sums_.device().is_cpu() ? concatenate_on_host() : concatenate_on_device();
    divide_(sums_, division_.before);
    pending_ = channel_->start(label, "reduce-scatter", sums_.device(), sums_.nbytes(), [&](Collectives& c) {
      return c.all_reduce(sums_, ReduceOp::kSum);
    });
  }

 private:
  void conclude() override {
    divide_sums();
    copy_out(sums_, begins_, args_.slices);
    args_.wholes.clear();
    sums_.reset();
    channel_->pool().give_back(std::exchange(memory_, at::Tensor()));
  }

  void divide_sums() {
    if (sums_.device().is_cpu()) { // an operator takes longer than a few hundred divisions
      reduce(sums_, {sums_.const_data_ptr()}, ReduceOp::kSum, division_.after);
    } else {
      divide_(sums_, division_.after);
    }
  }

  void concatenate_on_host() {
    char* to = static_cast<char*>(sums_.mutable_data_ptr());
    for (const at::Tensor& whole : args_.wholes) {
      if (whole.numel() > 0) { // an empty one has no address
        std::memcpy(to, whole.const_data_ptr(), whole.nbytes());
        to += whole.nbytes();
      }
    }
    args_.wholes.clear(); // copied; a device still has to do that
  }

  void concatenate_on_device() {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& whole : args_.wholes) {
      flat.push_back(whole.view({-1}));
    }
    at::cat_out(sums_, flat);
  }

  std::shared_ptr<Channel> channel_;
  ReduceScatter args_;
  Division division_;
  at::Tensor memory_; // from the pool
  at::Tensor sums_; // the wholes, one after another
  std::vector<int64_t> begins_; // of this rank's slices in it
};

/// Rows are padded to equal lengths, so that with more ranks than rows of a parameter they are mostly padding: 4096
/// times 20 numbers for a Linear(16, 16) on 4096 ranks. An all-reduce moves each number twice, and no padding.
bool mostly_padding(const ReduceScatter& args, const RankMajor& layout, int size) {
  int64_t numel = 0;
  for (const at::Tensor& whole : args.wholes) {
    numel += whole.numel();
  }
  const int64_t padded = layout.row() * size;
  return padded > 2 * numel && padded * args.wholes.front().element_size() > kLittle;
}

/// The same sums, of real numbers.
void view_as_real(ReduceScatter& args) {
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    args.wholes[i] = at::view_as_real(args.wholes[i]);
    args.slices[i] = at::view_as_real(args.slices[i]);
    Cut& cut = args.cuts[i];
    cut = {cut.numel * 2, cut.chunk * 2, cut.before * 2};
  }
}

} // namespace

std::unique_ptr<Work> start_reduce_scatter(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label) {
  const c10::NoGradGuard no_grad;
  if (!args.wholes.empty() && args.wholes.front().is_complex()) {
    view_as_real(args);
  }
  RankMajor layout(args, channel->rank(), channel->size());
  if (layout.row() == 0) {
    return std::make_unique<Queued>(c10::kCPU); // nothing to do on any rank
  }
  const at::Tensor& like = args.slices.front();
  const bool on_host = like.device().is_cpu();
  if (mostly_padding(args, layout, channel->size()) && (!on_host || host_backends_combine(like.scalar_type()))) {
    return std::make_unique<WholeSum>(std::move(channel), std::move(args), label);
  }
  if (on_host && host_combines(like.scalar_type())) {
    return std::make_unique<HostSum>(std::move(channel), std::move(args), std::move(layout), label);
  }
  return std::make_unique<BackendSum>(std::move(channel), std::move(args), std::move(layout), label);
}

} // namespace fsdp::adapter
