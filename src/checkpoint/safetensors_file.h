#pragma once

#include <string>
#include <unordered_map>

#include "checkpoint/file.h"
#include "checkpoint/safetensors_header.h"

namespace fsdp::disk {

/// A safetensors file that is open to be read. Its header has been checked against its length. Reading is thread safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path, File::Links links = File::Links::kFollow);

  const std::string& path() const {
    return file_.path();
  }
  const SafetensorsHeader& header() const {
    return header_;
  }
  /// An Error if there is none.
  const StoredTensor& tensor(const std::string& name) const;
  /// Where a tensor's bytes begin in the file.
  int64_t offset_of(const StoredTensor& tensor) const {
    return data_ + tensor.begin;
  }
  /// Some of a tensor's bytes.
  void read(const StoredTensor& tensor, int64_t offset, void* to, int64_t bytes) const;

 private:
  File file_;
  int64_t data_ = 0; // where the bytes of tensors begin
  SafetensorsHeader header_{};
  std::unordered_map<std::string, size_t> by_name_{};
};

/// A safetensors file that is written from its first byte to its last.
class SafetensorsWriter {
 public:
  /// Makes the file, and writes the header. Of `header`, tensors need names, dtypes and sizes.
  SafetensorsWriter(const std::string& path, SafetensorsHeader header);

  /// In the order in which their bytes have to come, and with their places.
  const std::vector<StoredTensor>& tensors() const {
    return header_.tensors;
  }
  /// Where a tensor's bytes begin in the file.
  int64_t offset_of(const StoredTensor& tensor) const {
    return data_ + tensor.begin;
  }
  void write(const void* from, int64_t bytes);
  /// Once all bytes have come: returns when they are on the disk.
  void finish();

 private:
  SafetensorsHeader header_;
  std::string text_;
  int64_t data_;
  File file_;
};

} // namespace fsdp::disk
