#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

/// [Note: watched code] The test's copy of src/comm/shm is compiled with -fsanitize=thread, but linked with functions
/// of our own where the sanitizer's would be: each access to memory asks them first. So the library's own steps are
/// explored, and nothing in it knows. Sleeping, process numbers and segments are replaced at link time.
namespace fsdp::testing::watched {

enum class Kind : uint8_t { kRead, kWrite };

/// What becomes of an access.
enum class Verdict : uint8_t { kAsWritten, kDrop, kReadMost };

// What watched code calls; `Explorer` implements them.
Verdict before_atomic(const void* address, size_t bytes, Kind kind);
void after_read(const void* address, uint64_t value);
void after_write(const void* address, uint64_t value);
void before_plain_write(const void* address);
void sleep(const std::atomic<uint32_t>& word, uint32_t seen);
void relax();

// What takes the place of the system.
int rank(); ///< -1: outside of an exploration
void nap();
bool sees_end_of(int rank);
/// Memory that ranks share; the first of a run is a group's control segment.
void add_region(const char* begin, size_t bytes);

} // namespace fsdp::testing::watched
