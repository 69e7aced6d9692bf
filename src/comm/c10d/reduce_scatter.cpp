#include "comm/c10d/reduce_scatter.h"

#include <utility>

#include <c10/core/GradMode.h>

#include "base/view_into.h"
#include "comm/c10d/copy_each.h"
#include "comm/c10d/host_combine.h"
#include "comm/c10d/rank_major.h"
#include "comm/c10d/streamed_work.h"
#include "comm/divide.h"

namespace fsdp::adapter {
namespace {

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
    copy_each(args_.slices, layout_.views(sums_, args_.slices));
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
    const int64_t item = args_.slices.front().element_size();
    const char* rows = static_cast<const char*>(received_.const_data_ptr());
    std::vector<const void*> sources(static_cast<size_t>(channel_->size()));
    for (size_t i = 0; i < args_.slices.size(); ++i) {
      const char* from = rows + layout_.offset(i) * item;
      for (const void*& source : sources) {
        source = std::exchange(from, from + layout_.row() * item);
      }
      combine_on_host(args_.slices[i], sources, ReduceOp::kSum, args_.divide_by);
    }
    channel_->pool().give_back(std::exchange(received_, at::Tensor()));
  }

  at::Tensor received_; // from the pool; row r came from rank r
};

} // namespace

std::unique_ptr<Work> start_reduce_scatter(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label) {
  const c10::NoGradGuard no_grad;
  RankMajor layout(args, channel->size());
  if (layout.row() == 0) {
    return std::make_unique<NoWork>();
  }
  const at::Tensor& like = args.slices.front();
  if (like.device().is_cpu() && combines_on_host(like.scalar_type())) {
    return std::make_unique<HostSum>(std::move(channel), std::move(args), std::move(layout), label);
  }
  return std::make_unique<BackendSum>(std::move(channel), std::move(args), std::move(layout), label);
}

} // namespace fsdp::adapter
