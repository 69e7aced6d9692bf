#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/cut.h>
#include <fsdp/export.h>

namespace c10d {
class ProcessGroup;
}

namespace fsdp {

/// What a collective is for: carried with it, so that a failure names it and ranks that disagree get an error naming
/// both.
struct Label {
  const char* operation; ///< a literal: "unshard", "reduce gradients", ...
  std::string unit; ///< the unit's name, or empty
};

/// What the ranks of a group share, and gather: one parameter, or many that are cut as one.
struct Piece {
  int64_t numel; ///< of the whole
  int64_t chunk; ///< of a full slice; trailing ranks may hold less, or nothing
  c10::ScalarType stored; ///< dtype of the slices
  c10::ScalarType gathered; ///< dtype of the whole once gathered

  int64_t begin(int rank) const {
    return Cut{numel, chunk}.begin(rank);
  }
  int64_t length(int rank) const {
    return Cut{numel, chunk}.length(rank);
  }
  /// Of so many ranks, the first, slices hold something.
  int holders() const {
    return chunk == 0 ? 0 : static_cast<int>((numel + chunk - 1) / chunk);
  }
};

/// A running collective. Destroying it unfinished is allowed only after an error.
class FSDP_API Work {
 public:
  virtual ~Work();
  /// Makes what progress it can without blocking; true when `wait` would not block.
  virtual bool done() = 0;
  /// Returns once the result may be used on the current stream; throws `CommError`.
  virtual void wait() = 0;
};

/// Every rank's slices of the pieces of a home, made visible. Destroying it gives the memory back, for use after what
/// the then current stream has queued.
class FSDP_API Gathered {
 public:
  virtual ~Gathered();
  /// Returns once the pieces may be read on the current stream; throws `CommError`.
  virtual void wait() = 0;
  /// The whole piece: the ranks' slices one after another. Readable after `wait`; never written.
  virtual void* piece(size_t index) const = 0;
  /// Its owner goes, on whatever thread, at a moment that the ranks need not share. Destroying it follows.
  virtual void abandon() {}
  /// Memory that this rank pays for while this lives: 0 when the slices are read where they are.
  virtual int64_t bytes() const = 0;
};

/// The memory of one unit's shards on this rank, given out by its group.
class FSDP_API Home {
 public:
  virtual ~Home();
  /// This rank's slice of a piece, writable between `begin_write` and the next `gather`.
  virtual void* slice(size_t index) const = 0;
  /// Returns once no other rank still reads the values about to be overwritten. Cheap when already writing.
  virtual void begin_write(const Label& label) = 0;
  /// Starts to make all slices visible, with this rank's writes so far. At most one `Gathered` of a home lives at a
  /// time.
  virtual std::unique_ptr<Gathered> gather(const Label& label) = 0;
};

struct HomeOptions {
  c10::Device device = c10::kCPU; ///< where gathered pieces are read
  bool offload = false; ///< slices live on the host
  bool pin_memory = false; ///< with `offload`: in page-locked memory, where the device has it
  bool rewritten = false; ///< slices are written anew before every gather: other ranks read copies of them
};

/// Sum each rank's whole tensors and keep this rank's slices of the sums. Where ranks read them in place, `wait` lasts
/// until all have: until each has come to a wait of its own, in this group or another.
struct ReduceScatter {
  std::vector<at::Tensor>
      wholes; ///< contiguous, one dtype; may be overwritten; not to be written before `wait` returns
  /// Per tensor. Those with something before them are parts of what the tensor before them in the list is a part of.
  std::vector<Cut> cuts;
  std::vector<at::Tensor> slices; ///< contiguous results, same dtype
  double divide_by = 1; ///< the sums are divided by it
};

enum class ReduceOp { kSum, kMax, kMin };

/// What is known of writes to this rank's slices that nobody will announce.
struct ExpectedWrites {
  bool certain = false; ///< a step of an optimizer follows; else there may be no write, and a gather ends the time
  std::vector<const void*> changes; ///< places in slices; none, though certain: this rank goes by those that have some
};

/// Ranks that act together: the narrow interface the engine needs from a means of communication.
/// All ranks of a group call its collectives in the same order. Not thread safe: one thread at a time.
class FSDP_API Group {
 public:
  virtual ~Group();

  /// Any c10d backend: NCCL, Gloo, MPI, a vendor's.
  static std::shared_ptr<Group> from(c10::intrusive_ptr<c10d::ProcessGroup> process_group);
  /// The same ranks joined by shared memory, where `device` is the CPU and all of them are on one host; else as `from`.
  /// FSDP_SHM=0 on any rank rules shared memory out. Collective.
  static std::shared_ptr<Group> nearest(c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  /// For errors: "shm", "gloo", "nccl", "alone", ...
  const std::string& name() const {
    return name_;
  }

  /// Memory for this rank's slices. Collective.
  virtual std::shared_ptr<Home> make_home(
      std::vector<Piece> pieces, const HomeOptions& options, const Label& label) = 0;
  /// True if gathering moves no bytes between ranks, so that keeping a smaller copy around would gain nothing.
  virtual bool gathers_in_place() const = 0;

  /// From now until its `end_unseen_writes`, or until its slices are seen to have changed, this rank may write them
  /// with no word to any home. Returns once no rank reads them in place; gathers come after all ranks' writes.
  /// Collective. Nothing to do where nobody reads what another rank writes.
  virtual void begin_unseen_writes(const ExpectedWrites& /*expected*/, const Label& /*label*/) {}
  virtual void end_unseen_writes() {}

  virtual std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) = 0;
  /// In place; `tensor` is contiguous.
  virtual std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) = 0;
  virtual void broadcast(at::Tensor tensor, int root, const Label& label) = 0;
  virtual void barrier(const Label& label) = 0;
  /// Every rank's `bytes`, in rank order. For set-up, not for steps.
  virtual std::vector<std::string> exchange(const std::string& bytes, const Label& label) = 0;
  /// The group of the ranks that give the same `color`, ordered as here. Collective.
  virtual std::shared_ptr<Group> split(int color, const Label& label) = 0;
  /// As `split`, but made once for each purpose, and kept as long as this group. Collective.
  std::shared_ptr<Group> part(int color, const std::string& purpose, const Label& label);
  /// Lets the other ranks fail at their next wait, with `reason`.
  virtual void abort(const std::string& reason) = 0;

 protected:
  Group(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

 private:
  int rank_;
  int size_;
  std::string name_;
  std::map<std::string, std::shared_ptr<Group>> parts_; // by purpose
};

/// A group of one rank: no collective, no copy.
FSDP_API std::shared_ptr<Group> group_of_one();

/// An all-gather of small strings among the ranks, over whatever rendezvous there is. Used for set-up only.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

struct ShmOptions {
  /// Longest wait for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Serve big CPU tensors of this process from memory that the other ranks can read.
  bool arena = true;
};

/// Whether all ranks see each other's memory: one host, one pid namespace, readable /proc/<pid>/fd.
/// Collective: every rank gets the same answer.
FSDP_API bool shm_available(const Exchange& exchange);
/// The ranks of one host, joined by shared memory. Collective. Ranks may be processes or threads.
FSDP_API std::shared_ptr<Group> shm_group(int rank, int size, const Exchange& exchange, const ShmOptions& options = {});

/// Runs `body` on `size` threads, each one rank of a world of its own: `fsdp::rank()` and the default mesh are the
/// thread's. Rethrows the first failing rank's exception once all threads have ended.
FSDP_API void thread_group(
    int size, const std::function<void()>& body, std::chrono::milliseconds timeout = std::chrono::seconds(60));

} // namespace fsdp
