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
  using Bucket::Bucket;

  bool is_extended() const override {
    return true;
  }
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
  void begin_write() override;
  int64_t bytes() const override;

 private:
  /// One of the tensors that a parameter is sent as, of each rank.
  struct Sent {
    explicit Sent(const at::Tensor& tensor) : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()) {}
    int64_t bytes() const;
    std::vector<int64_t> sizes_of_all(int ranks) const;
    bool operator==(const Sent& other) const = default;

    std::vector<int64_t> sizes;
    c10::ScalarType dtype;
  };
  struct Extended {
    Param& param;
    std::shared_ptr<GatherExtension> extension;
    std::vector<Sent> sent{};
    size_t first_piece = 0; // of those in the home
    std::vector<at::Tensor> parts{}; // of the whole parameter, with their memory; none unless gathered

    std::vector<at::Tensor> made_before_gather() const;
  };

  std::vector<Piece> pieces() const override;
  void settle(Extended& each);
  void check_alike(const Label& label) const;
  void write(const Extended& each, const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> gathered_tensors(const Extended& each) const;
  static void make_whole(Extended& each, const std::vector<at::Tensor>& gathered);
  static void show_parts(const Extended& each);

  std::vector<Extended> all_; // by index
};

} // namespace fsdp::engine
