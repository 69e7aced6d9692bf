#pragma once

#include <string>
#include <vector>

#include "engine/bucket.h"
#include "engine/flat_shard.h"

namespace fsdp::engine {

/// Of a flat parameter.
struct NamedDtype {
  std::string name;
  c10::ScalarType dtype;
};
void check_one_dtype(const std::vector<NamedDtype>& parameters);

/// Parameters that are cut as one flat parameter: its home is a single piece, of which each is a part.
class FlatBucket final : public Bucket {
 public:
  using Bucket::Bucket;
  void settle(const Label& label) override;
  void settle_among(int, const Label&) override {} // a flat unit is gathered among all, always
  bool lies_well(const Param& param) const override;
  void values_change(Param& param) override;
  void move_waiting_gradients(WaitingMove move) override;
  FlatShard* flat_shard() const override {
    return flat_shard_.get();
  }

 private:
  std::vector<Piece> pieces() const override;
  void* slice(const Home& home, size_t index) const override;
  void* whole(const Gathered& gathered, size_t index) const override;

  std::shared_ptr<FlatShard> flat_shard_;
};

} // namespace fsdp::engine
