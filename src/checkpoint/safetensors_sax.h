#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors_header.h"

namespace fsdp::disk {

/// Takes a header's JSON word by word, so that nothing is kept but what a header may hold, in whatever depth lists lie
/// in one another. Throws an Error at the first word that is out of place.
class SafetensorsSax : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit SafetensorsSax(const std::string& path) : path_(path) {}

  /// Once all has been taken.
  SafetensorsHeader& header() {
    return header_;
  }

  bool null() override;
  bool boolean(bool value) override;
  bool number_integer(int64_t value) override;
  bool number_unsigned(uint64_t value) override;
  bool number_float(double value, const std::string& text) override;
  bool string(std::string& value) override;
  bool binary(nlohmann::json::binary_t& value) override;
  bool start_object(size_t elements) override;
  bool key(std::string& name) override;
  bool end_object() override;
  bool start_array(size_t elements) override;
  bool end_array() override;
  bool parse_error(size_t position, const std::string& last, const nlohmann::json::exception& error) override;

 private:
  enum class Place { kOutside, kNames, kMetadata, kTensor, kSizes, kOffsets };

  [[noreturn]] void refuse(const std::string& what) const;
  void begin_entry(const std::string& name);
  void begin_field(const std::string& name);
  void end_tensor();

  const std::string& path_;
  SafetensorsHeader header_{};
  Place place_ = Place::kOutside;
  std::string entry_{}; // what is being read: a tensor's name, or that of the metadata
  std::string field_{};
  StoredTensor tensor_{};
  std::vector<int64_t> offsets_{};
  bool has_dtype_ = false, has_sizes_ = false, has_offsets_ = false, has_metadata_ = false;
};

} // namespace fsdp::disk
