#include "report.h"

#include <filesystem>
#include <fstream>

#include <fsdp/error.h>
#include <nlohmann/json.hpp>

namespace train_gpt {

extern const char* const kReportPage; // report.html, made a string by the build

namespace {

/// JSON that may stand inside a <script> element.
std::string embeddable(const nlohmann::json& data) {
  std::string text = data.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) {
    text.replace(at, 1, "\\u003c");
  }
  return text;
}

} // namespace

void write_report(const History& history, const std::string& path) {
  std::string page = kReportPage;
  const std::string place = "{{history}}";
  page.replace(page.find(place), place.size(), embeddable(to_json(history)));
  std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  if (!folder.empty()) {
    std::filesystem::create_directories(folder, error);
  }
  std::ofstream file(path);
  if (!(file << page << std::flush)) {
    throw fsdp::Error("[results] expected to write " + path + ", could not: name another file with --report FILE");
  }
}

} // namespace train_gpt
