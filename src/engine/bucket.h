#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/gather_extension.h>
#include <fsdp/group.h>
#include <fsdp/mesh.h>

#include "engine/param.h"

namespace fsdp::engine {

class FlatShard;

/// The parameters of a unit that lie on one mesh, at least one: they share a home and are gathered and reduced
/// together. Memory under the handles comes either from a gather, or is private to this rank and writable.
class Bucket {
 public:
  Bucket(const Unit& unit, Mesh mesh);
  virtual ~Bucket();

  const Unit& unit() const {
    return unit_;
  }
  const Mesh& mesh() const {
    return mesh_;
  }
  /// Its parameters have gather extensions.
  virtual bool is_extended() const {
    return false;
  }
  Group& shard_group() const {
    return *shard_group_;
  }
  const std::shared_ptr<Group>& shared_shard_group() const {
    return shard_group_;
  }
  /// Null unless the mesh is hybrid.
  Group* replicate_group() const {
    return replicate_group_.get();
  }
  /// The groups that gathers and reductions really go over; another implementation may be put around them.
  std::shared_ptr<Group> gather_group;
  std::shared_ptr<Group> reduce_group;

  const std::vector<Param*>& params() const {
    return params_;
  }
  virtual void add(Param* param, std::shared_ptr<GatherExtension> extension);
  /// From the next `settle` on.
  c10::ScalarType gathered_dtype(c10::ScalarType stored) const;

  /// False while all parameters are on the meta device.
  bool has_values() const;
  /// What users see in place of its parameters' shards; null where they see these.
  virtual FlatShard* flat_shard() const {
    return nullptr;
  }
  /// Gathered memory can be a parameter's own: no copy is made of it.
  virtual bool lies_well(const Param& param) const;
  /// True if the handles point into memory that other ranks write.
  virtual bool reads_in_place() const;
  /// Whether a gather needs the other ranks: not where all slices are read in place.
  virtual bool gathers_together() const;
  /// Gives the shards their memory, those excepted that are on the meta device. Collective.
  virtual void settle(const Label& label);
  /// From now on, `keep_share` keeps the whole among `ranks` neighbours. Collective.
  virtual void settle_among(int ranks, const Label& label);

  /// Gather: start, finish (then the handles have memory), undo.
  virtual void gather(const Label& label);
  virtual void wait();
  virtual void release();
  /// In place of `wait`, before a release: nobody wants to see what was gathered.
  void wait_unseen();
  /// Before a release, on the gather stream: keeps this rank's share of the whole, so that the next gather is among
  /// neighbours. Nothing where gathering costs nothing.
  void keep_share(const Label& label);
  /// The next gather will be among all.
  void drop_share() {
    share_.reset();
  }
  virtual void place(Param& param);

  /// The whole parameters in the shards' own dtypes. Collective, whether they are gathered here or not.
  std::vector<at::Tensor> put_together(c10::Device target, const Label& label) const;

  /// Instead of gathered memory, which nobody may write, gives the handles writable copies.
  void make_private();
  /// The same with copies that may have another dtype or device, which the handles then have too.
  void make_private(std::vector<at::Tensor> copies);
  /// An error where wholes cannot be written.
  virtual void check_writable() const {}
  bool is_private() const {
    return !private_.empty();
  }
  at::Tensor private_copy(const Param& param) const {
    return private_[index_of(param)];
  }
  /// Dense data of the parameter's sizes.
  void replace_private_copy(Param& param, const at::Tensor& data);
  /// This rank's part of the private copies goes to the shards: of all that may have been written, or of one.
  void write_back();
  void write_back(const Param& param);
  /// The same of one, or of all, by one rank alone: while a guard shows copies on all ranks, nobody reads in place.
  void write_back_alone(const Param* only);
  /// Somebody may write private copies and not say when.
  void expect_writes() {
    may_be_written_ = is_private();
  }

  /// See Unit.
  virtual void move_waiting_gradients(WaitingMove move);

  /// Somebody is about to write what users see of a parameter's shard.
  virtual void values_change(Param& param);
  /// Returns once no rank reads this rank's shards any more.
  virtual void begin_write();
  /// Memory this rank pays for the handles' memory.
  virtual int64_t bytes() const;

 protected:
  size_t index_of(const Param& param) const;
  /// What the home consists of, and where a parameter lies there and in what is gathered of it.
  virtual std::vector<Piece> pieces() const;
  virtual void* slice(const Home& home, size_t index) const;
  virtual void* whole(const Gathered& gathered, size_t index) const;

  const Unit& unit_;
  std::shared_ptr<Home> home_;
  std::unique_ptr<Gathered> gathered_;

 private:
  void* memory_of(size_t index) const;
  std::vector<Piece> pieces_among_neighbours() const;

  Mesh mesh_;
  std::shared_ptr<Group> shard_group_;
  std::shared_ptr<Group> replicate_group_;
  std::vector<Param*> params_;
  std::shared_ptr<Group> neighbours_; // null unless shares are kept
  std::shared_ptr<Home> share_; // between a release and the gather after it, or null
  std::vector<at::Tensor>
      unpacked_; // wholes of parameters whose slices are not their own memory; by index, else undefined
  std::vector<at::Tensor> private_; // by index; empty unless is_private()
  bool may_be_written_ = false; // private copies, and the shards do not have it yet
  void write_back(size_t index);
};

} // namespace fsdp::engine
