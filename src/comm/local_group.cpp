#include <utility>

#include <fsdp/group.h>

#include "comm/arguments.h"
#include "comm/payload.h"
#include "comm/queued.h"
#include "comm/reduce.h"

namespace fsdp {
namespace {

class LocalHome final : public Home {
 public:
  LocalHome(std::vector<Piece> pieces, const HomeOptions& options)
      : offloaded_(options.offload), pieces_(std::move(pieces)), device_(options.device) {
    for (const Piece& piece : pieces_) {
      stored_.push_back(slice_memory(piece.numel, piece.stored, options));
    }
  }
  void* slice(size_t index) const override {
    return stored_[index].mutable_data_ptr();
  }
  // A copy of the slices may be on its way on another stream. Who writes them is the current stream, or the host.
  void begin_write(const Label&) override {
    offloaded_ ? copied_.synchronize() : copied_.block(current_stream(device_));
  }
  // The pieces are whole where they are stored; copies only where dtype or device differ.
  std::unique_ptr<Gathered> gather(const Label&) override {
    std::vector<at::Tensor> wholes;
    int64_t copied = 0;
    for (size_t i = 0; i < stored_.size(); ++i) {
      wholes.push_back(stored_[i].to(device_, pieces_[i].gathered, /*non_blocking=*/true));
      copied += wholes[i].is_same(stored_[i]) ? 0 : static_cast<int64_t>(wholes[i].nbytes());
    }
    if (copied > 0) {
      copied_.record(current_stream(device_));
    }
    return std::make_unique<CopiedOut>(std::move(wholes), device_, copied);
  }

 private:
  bool offloaded_;
  Event copied_; // the last copy that a gather made: the next write has to wait for it
  std::vector<Piece> pieces_;
  c10::Device device_;
  std::vector<at::Tensor> stored_;
};

class LocalGroup final : public Group {
 public:
  LocalGroup() : Group(0, 1, "alone") {}

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    check_pieces(pieces, /*size=*/1, label);
    return std::make_shared<LocalHome>(std::move(pieces), options);
  }
  bool gathers_in_place() const override {
    return true;
  }
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    check_reduce_scatter(args, /*rank=*/0, /*size=*/1, label);
    for (size_t i = 0; i < args.wholes.size(); ++i) {
      args.slices[i].view(-1).copy_(args.wholes[i].view(-1), /*non_blocking=*/true);
      divide_(args.slices[i], args.divide_by);
    }
    return std::make_unique<Queued>(args.wholes.empty() ? c10::Device(c10::kCPU) : args.wholes[0].device());
  }
  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    check_all_reduce(tensor, op, label);
    divide_(tensor, divide_by);
    return std::make_unique<Queued>(tensor.device());
  }
  void broadcast(at::Tensor tensor, int root, const Label& label) override {
    check_plain_memory(tensor, label);
    check_root(root, /*size=*/1, label);
  }
  void barrier(const Label&) override {}
  std::vector<std::string> exchange(const std::string& bytes, const Label&) override {
    return {bytes};
  }
  std::shared_ptr<Group> split(int, const Label&) override {
    return group_of_one();
  }
  void abort(const std::string&) override {}
};

} // namespace

std::shared_ptr<Group> group_of_one() {
  return std::make_shared<LocalGroup>();
}

} // namespace fsdp
