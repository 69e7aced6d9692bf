#include "streams/race_detector.h"

#include <algorithm>
#include <utility>

namespace fsdp::testing {

namespace {

void merge(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) {
    into[i] = std::max(into[i], from[i]);
  }
}

} // namespace

bool comes_after(const Clock& later, const Clock& earlier) {
  Clock both = later;
  merge(both, earlier);
  return both == later;
}

RaceDetector::RaceDetector(int devices, int streams_per_device) : streams_per_device_(streams_per_device) {
  const Clock start(devices * streams_per_device, 0);
  streams_.assign(devices * streams_per_device, start);
  hosts_.assign(devices, start);
  bytes_.resize(devices);
  free_.resize(streams_.size());
}

void RaceDetector::allocated(const void* memory, size_t bytes, int stream) {
  const std::lock_guard lock(mutex_);
  const int64_t now = submit(stream);
  for (Block& block : std::exchange(free_[stream], {})) {
    if (block.recorded.count(block.last_write.stream) == 0) {
      expect_before(block.last_write, streams_[stream], "an allocation of memory given back");
    }
    std::erase_if(block.reads, [&](const auto& read) { return block.recorded.count(read.first) != 0; });
    expect_reads_before(block, streams_[stream], "an allocation of memory given back");
  }
  blocks_[static_cast<const char*>(memory)] =
      Block{.bytes = bytes, .owner = stream, .last_write = {stream, now, "allocation"}, .reads = {}, .recorded = {}};
  count_bytes(stream, static_cast<int64_t>(bytes));
}

void RaceDetector::count_bytes(int stream, int64_t bytes) {
  Bytes& counted = bytes_[stream / streams_per_device_];
  counted.now += bytes;
  counted.most = std::max(counted.most, counted.now);
}

int64_t RaceDetector::most_bytes_since_last_call(int device) {
  const std::lock_guard lock(mutex_);
  Bytes& counted = bytes_[device];
  const int64_t beyond = counted.most - counted.at_first;
  counted.most = counted.at_first = counted.now;
  return beyond;
}

void RaceDetector::allocated_on_host(const void* memory, size_t bytes) {
  const std::lock_guard lock(mutex_);
  blocks_[static_cast<const char*>(memory)] =
      Block{.bytes = bytes, .owner = -1, .last_write = {}, .reads = {}, .recorded = {}};
}

bool RaceDetector::is_on_host(const void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  return found != blocks_.end() && found->second.owner < 0;
}

int RaceDetector::stream_of(const void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  return found != blocks_.end() ? found->second.owner : 0;
}

void RaceDetector::freed(const void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  if (found == blocks_.end()) {
    return;
  }
  if (const int owner = found->second.owner; owner >= 0) {
    count_bytes(owner, -static_cast<int64_t>(found->second.bytes));
    free_[owner].push_back(std::move(found->second));
  }
  blocks_.erase(found);
}

void RaceDetector::recorded(const void* memory, int stream) {
  const std::lock_guard lock(mutex_);
  if (const auto found = find(memory); found != blocks_.end()) {
    found->second.recorded.insert(stream);
  }
}

void RaceDetector::used(const void* memory, bool writes, int stream, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  if (found == blocks_.end()) {
    races_.push_back(operation + " uses memory that was given back");
    return;
  }
  Block& block = found->second;
  const int64_t now = submit(stream);
  expect_before(block.last_write, streams_[stream], operation);
  if (writes) {
    expect_reads_before(block, streams_[stream], operation);
    block.last_write = {stream, now, operation};
    block.reads.clear();
  } else {
    block.reads[stream] = {stream, now, operation};
  }
}

void RaceDetector::written_by_host(const void* memory, int device, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  if (found != blocks_.end()) {
    expect_before(found->second.last_write, hosts_[device], operation);
    expect_reads_before(found->second, hosts_[device], operation);
  }
}

void RaceDetector::read_by_host(const void* memory, int device, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  const auto found = find(memory);
  if (found != blocks_.end()) {
    expect_before(found->second.last_write, hosts_[device], operation);
  }
}

Clock RaceDetector::record(int stream) {
  const std::lock_guard lock(mutex_);
  return streams_[stream];
}

void RaceDetector::block(int stream, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  merge(streams_[stream], clock);
}

void RaceDetector::host_waits(int device, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  ++host_waits_;
  merge(hosts_[device], clock);
}

bool RaceDetector::host_has_waited(int device, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  return comes_after(hosts_[device], clock);
}

int64_t RaceDetector::waits_of_host() {
  const std::lock_guard lock(mutex_);
  return host_waits_;
}

void RaceDetector::begin_test() {
  const std::lock_guard lock(mutex_);
  free_.assign(free_.size(), {});
  races_.clear();
}

std::vector<std::string> RaceDetector::take_races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

// Work that is queued now comes after what the host has waited for.
int64_t RaceDetector::submit(int stream) {
  merge(streams_[stream], hosts_[stream / streams_per_device_]);
  return ++streams_[stream][stream];
}

bool RaceDetector::is_before(const Use& use, const Clock& clock) const {
  return clock[use.stream] >= use.time;
}

void RaceDetector::expect_before(const Use& use, const Clock& clock, const std::string& operation) {
  if (!is_before(use, clock)) {
    const auto stream = std::to_string(use.stream % streams_per_device_);
    races_.push_back(operation + " does not come after " + use.operation + " on stream " + stream);
  }
}

void RaceDetector::expect_reads_before(const Block& block, const Clock& clock, const std::string& operation) {
  for (const auto& [stream, use] : block.reads) {
    expect_before(use, clock, operation);
  }
}

std::map<const char*, RaceDetector::Block>::iterator RaceDetector::find(const void* memory) {
  const auto* address = static_cast<const char*>(memory);
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) {
    return blocks_.end();
  }
  const auto found = std::prev(next);
  return address < found->first + found->second.bytes ? found : blocks_.end();
}

} // namespace fsdp::testing
