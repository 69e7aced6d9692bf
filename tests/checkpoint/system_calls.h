#pragma once

#include <cstdint>
#include <string>

/// The calls by which this program changes and reads files, which go through here. They can be counted, and come to
/// nothing at any point: as on a full disk, or because the process is killed. Between two points lies one call, or half
/// of what one call writes.
namespace fsdp::testing {

/// Of this thread, from now on: its calls fail from that point on, as on a full disk. -1: none does.
void fail_from_point(int64_t point);
/// Of this process: it is killed at that point.
void kill_at_point(int64_t point);
/// This thread's points since `fail_from_point`.
int64_t points();

/// Of this thread: what has such a path's ending cannot be removed, as if somebody used it. "": everything can.
void refuse_to_remove(const std::string& ending);
/// Of this thread: folders cannot be read to their end.
void fail_to_list(bool fails);

/// Of this process: flushing what has such a path's ending fails, as on a full disk. "": nothing does.
void fail_to_flush(const std::string& ending);
/// Of this process: it does not end. "": it goes on.
void hold_flush(const std::string& ending);

/// Bytes that this thread has read from files whose paths end so, since it said so.
void count_reads_of(const std::string& ending);
int64_t bytes_read();

} // namespace fsdp::testing
