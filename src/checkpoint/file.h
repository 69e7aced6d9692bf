#pragma once

#include <cstdint>
#include <string>

/// Files and folders of checkpoints. Errors name the path, and say what the system said.
namespace fsdp::disk {

/// An open file. Not thread safe, but for `read`. Nothing is done in the destructor that could fail: what has to be on
/// the disk is flushed before.
class File {
 public:
  /// An ordinary file, to be read. A link is followed only where `links` says so: what checkpoints consist of are no
  /// links.
  enum class Links { kRefuse, kFollow };
  static File open(const std::string& path, Links links);
  /// A new file, to be written; an Error if there is one.
  static File create(const std::string& path);
  /// One that is there, to be written in places.
  static File open_to_write(const std::string& path);

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const {
    return path_;
  }
  /// As it was when the file was opened.
  int64_t size() const {
    return size_;
  }
  /// All of [offset, offset + bytes), or an Error.
  void read(int64_t offset, void* to, int64_t bytes) const;
  /// At the end.
  void write(const void* from, int64_t bytes);
  /// Within what `extend` has made.
  void write_at(int64_t offset, const void* from, int64_t bytes);
  /// With zeros, up to so many bytes.
  void extend(int64_t bytes);
  /// Returns once what was written is on the disk.
  void flush();

 private:
  File(std::string path, int descriptor, int64_t size);

  void start_flushing();

  std::string path_;
  int descriptor_;
  int64_t size_;
  int64_t flushing_ = 0; // bytes that are on their way to the disk
};

/// All of a file that is no longer than `limit`.
std::string read_text(const std::string& path, int64_t limit, File::Links links);
/// A new file that is on the disk, but for its name: that is when the folder is flushed.
void write_text(const std::string& path, const std::string& text);

} // namespace fsdp::disk
