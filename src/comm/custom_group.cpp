#include "comm/custom_group.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include "comm/arguments.h"
#include "comm/decorated_group.h"
#include "comm/divide.h"
#include "comm/queued.h"

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
      : group_(std::move(group)), collective_(std::move(collective)), pieces_(std::move(pieces)), options_(options) {
    const auto device = options_.offload ? c10::Device(c10::kCPU) : options_.device;
    for (const auto& piece : pieces_) {
      slices_.push_back(at::zeros({piece.chunk}, at::TensorOptions().dtype(piece.stored).device(device)));
    }
  }

  void* slice(size_t index) const override {
    return slices_[index].data_ptr();
  }
  void begin_write(const Label&) override {}

  std::unique_ptr<Gathered> gather(const Label&) override {
    std::vector<at::Tensor> wholes;
    for (const auto& piece : pieces_) {
      wholes.push_back(at::empty({piece.numel}, at::TensorOptions().dtype(piece.gathered).device(options_.device)));
    }
    for (const auto dtype : dtypes()) {
      gather(dtype, wholes);
    }
    return std::make_unique<CopiedOut>(std::move(wholes), options_.device);
  }

 private:
  std::vector<c10::ScalarType> dtypes() const {
    std::vector<c10::ScalarType> found;
    for (const auto& piece : pieces_) {
      if (std::find(found.begin(), found.end(), piece.gathered) == found.end()) {
        found.push_back(piece.gathered);
      }
    }
    return found;
  }

  void gather(c10::ScalarType dtype, std::vector<at::Tensor>& wholes) {
    int64_t numel = 0;
    for (const auto& piece : pieces_) {
      numel += piece.gathered == dtype ? piece.chunk : 0;
    }
    const auto tensor_options = at::TensorOptions().dtype(dtype).device(options_.device);
    auto input = at::empty({numel}, tensor_options);
    auto output = at::empty({group_->size() * numel}, tensor_options);
    for_each_of(dtype, [&](size_t i, int64_t offset) { input.narrow(0, offset, pieces_[i].chunk).copy_(slices_[i]); });
    collective_(output, input, *group_);
    for_each_of(dtype, [&](size_t i, int64_t offset) {
      for (int rank = 0; rank < group_->size(); ++rank) {
        const int64_t length = pieces_[i].length(rank);
        wholes[i].narrow(0, pieces_[i].begin(rank), length).copy_(output.narrow(0, rank * numel + offset, length));
      }
    });
  }

  template <typename Do>
  void for_each_of(c10::ScalarType dtype, const Do& apply) const {
    int64_t offset = 0;
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (pieces_[i].gathered == dtype) {
        apply(i, offset);
        offset += pieces_[i].chunk;
      }
    }
  }

  std::shared_ptr<Group> group_;
  Collective collective_;
  std::vector<Piece> pieces_;
  HomeOptions options_;
  std::vector<at::Tensor> slices_;
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
};

class OtherReduceScatter final : public WithCollective {
 public:
  using WithCollective::WithCollective;
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    check_reduce_scatter(args, rank(), size(), label);
    int64_t numel = 0;
    for (int64_t chunk : args.chunks) {
      numel += chunk;
    }
    if (numel == 0) {
      return std::make_unique<Queued>(args.wholes.empty() ? c10::Device(c10::kCPU) : args.wholes[0].device());
    }
    const c10::Device device = args.wholes[0].device();
    const auto options = args.wholes[0].options();
    auto input = at::zeros({size(), numel}, options);
    int64_t offset = 0;
    for (size_t i = 0; i < args.wholes.size(); ++i) {
      const auto flat = args.wholes[i].reshape({-1});
      const Piece piece{flat.numel(), args.chunks[i], flat.scalar_type(), flat.scalar_type()};
      for (int rank = 0; rank < size(); ++rank) {
        const int64_t length = piece.length(rank);
        input[rank].narrow(0, offset, length).copy_(flat.narrow(0, piece.begin(rank), length));
      }
      offset += args.chunks[i];
    }
    auto output = at::empty({numel}, options);
    collective_(output, input.flatten(), *base_);
    divide_(output, args.divide_by);
    offset = 0;
    for (size_t i = 0; i < args.slices.size(); ++i) {
      args.slices[i].copy_(output.narrow(0, offset, args.slices[i].numel()));
      offset += args.chunks[i];
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
