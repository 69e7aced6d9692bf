#pragma once

#include <memory>
#include <vector>

#include <fsdp/gather_extension.h>

#include "engine/bucket.h"

namespace fsdp::engine {

/// A bucket whose parameters travel by extensions: what is gathered is made of the shards anew each time, and the
/// wholes are made of what was gathered. The shards stay where they are; the home holds what is sent.
class ExtendedBucket final : public Bucket {
 public:
  explicit ExtendedBucket(BucketOptions options);
  ~ExtendedBucket() override;

  void add(Param* param, std::shared_ptr<GatherExtension> extension) override;
  bool reads_in_place() const override {
    return false;
  }
  bool gathers_together() const override {
    return true;
  }
  void settle(const Label& label) override;
  void settle_among(int, const Label&) override {} // a smaller copy of what was sent would have to be sent again
  void gather(const Label& label) override;
  void wait() override;
  void release() override;
  void place(Param& param) override;
  void check_writable() const override;
  void begin_write(const Unit& unit) override;
  int64_t bytes() const override;

 private:
  struct Sent;
  struct Part;

  std::vector<at::Tensor> made_before_gather(size_t index) const;
  void settle(size_t index);
  std::vector<Piece> pieces() const override;
  void check_alike(const Label& label) const;
  void write(size_t index, const std::vector<at::Tensor>& tensors, size_t first_piece);
  std::vector<at::Tensor> gathered_tensors(size_t index, size_t first_piece) const;
  void make_whole(size_t index, const std::vector<at::Tensor>& gathered);
  void show_parts(size_t index);

  std::vector<std::shared_ptr<GatherExtension>> extensions_; // by index, as all below
  std::vector<std::vector<Sent>> sent_;
  std::vector<std::vector<Part>> parts_; // empty unless gathered
};

} // namespace fsdp::engine
