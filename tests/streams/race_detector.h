#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {

/// What a point in a stream's work comes after: of every stream, how much.
using Clock = std::vector<int64_t>;
/// Whether who is at `later` comes after all that `earlier` comes after.
bool comes_after(const Clock& later, const Clock& earlier);

/// Finds uses of one piece of memory on two streams that nothing puts in order, at least one of them a write: with
/// vector clocks, so that an order counts only if an event, or a wait of the host, makes it. Thread safe.
///
/// Memory belongs to the stream on which it was allocated, as with a caching allocator: it may be used on another
/// stream only after what that stream had queued at the allocation; and once it was given back, all its uses have to
/// come before the stream's next allocation, which may be the same memory again.
class RaceDetector {
 public:
  RaceDetector(int devices, int streams_per_device);

  void allocated(const void* memory, size_t bytes, int stream);
  void freed(const void* memory);
  /// Host memory that devices copy from and to.
  void allocated_on_host(const void* memory, size_t bytes);
  bool is_on_host(const void* memory);
  /// What is queued on `stream` until the memory is given back will be over before it is used again (record_stream).
  void recorded(const void* memory, int stream);
  /// Of the memory's allocation.
  int stream_of(const void* memory);
  /// Work on `stream` reads or writes the memory.
  void used(const void* memory, bool writes, int stream, const std::string& operation);
  /// The host itself writes it, or reads it.
  void written_by_host(const void* memory, int device, const std::string& operation);
  void read_by_host(const void* memory, int device, const std::string& operation);

  Clock record(int stream);
  void block(int stream, const Clock& clock);
  /// The host waits; what it queues on the device later comes after.
  void host_waits(int device, const Clock& clock);
  bool host_has_waited(int device, const Clock& clock);

  int64_t waits_of_host();
  /// The most that was allocated on a device at once, beyond what was when this was called last.
  int64_t most_bytes_since_last_call(int device);
  /// Forgets what was given back so far.
  void begin_test();
  std::vector<std::string> take_races();

 private:
  struct Use {
    int stream = 0;
    int64_t time = 0;
    std::string operation;
  };
  struct Block {
    size_t bytes = 0;
    int owner = 0; // stream; -1 on the host
    Use last_write;
    std::map<int, Use> reads; // since then, by stream
    std::set<int> recorded; // streams
  };

  struct Bytes {
    int64_t now = 0, most = 0, at_first = 0;
  };

  int64_t submit(int stream);
  void count_bytes(int stream, int64_t bytes);
  bool is_before(const Use& use, const Clock& clock) const;
  void expect_before(const Use& use, const Clock& clock, const std::string& operation);
  void expect_reads_before(const Block& block, const Clock& clock, const std::string& operation);
  std::map<const char*, Block>::iterator find(const void* memory);

  std::mutex mutex_;
  int streams_per_device_;
  std::vector<Clock> streams_;
  std::vector<Clock> hosts_; // of each device: what the host knows to be done
  std::map<const char*, Block> blocks_; // by their beginning
  std::vector<std::vector<Block>> free_; // given back since the last allocation, by stream
  std::vector<std::string> races_;
  int64_t host_waits_ = 0;
  std::vector<Bytes> bytes_; // by device
};

} // namespace fsdp::testing
