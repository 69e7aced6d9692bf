#include "text.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include <fsdp/error.h>

namespace train_gpt {
namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (fs::is_directory(path) || !file || !(bytes << file.rdbuf())) {
    throw fsdp::Error(
        "[data] expected a readable text of some length, got '" + path + "': choose another with --data FILE");
  }
  return bytes.str();
}

/// The first line that a command prints; empty if it fails.
std::string first_line(const char* command) {
  auto close = [](FILE* pipe) { pclose(pipe); };
  std::unique_ptr<FILE, decltype(close)> pipe(popen(command, "r"), close);
  char line[4096] = "";
  if (!pipe || !fgets(line, sizeof line, pipe.get())) {
    return "";
  }
  std::string text = line;
  return text.substr(0, text.find('\n'));
}

std::string search_usual_places() {
  for (const char* root : {"/usr/lib", "/usr/local/lib"}) {
    std::error_code missing;
    for (const auto& entry : fs::directory_iterator(root, missing)) {
      fs::path topics = entry.path() / "pydoc_data/topics.py";
      if (entry.path().filename().string().starts_with("python3") && fs::exists(topics)) {
        return topics.string();
      }
    }
  }
  return "";
}

std::string find_python_topics() {
  std::string path = first_line("python3 -c 'import pydoc_data.topics as t; print(t.__file__)' 2>/dev/null");
  if (path.empty()) {
    path = search_usual_places();
  }
  if (path.empty()) {
    throw fsdp::Error(
        "[data] expected Python's pydoc_data/topics.py on this machine, found none: name a text with --data FILE");
  }
  return path;
}

/// Reads the literals of a Python source one after another.
class LiteralReader {
 public:
  explicit LiteralReader(const std::string& source) : source_(source) {}

  std::string read() {
    while (at_ < source_.size()) {
      char c = source_[at_];
      if (c == '"' || c == '\'') {
        literal(c, /*raw=*/at_ > 0 && source_[at_ - 1] == 'r');
      } else if (c == '#') {
        at_ = std::min(source_.find('\n', at_), source_.size());
      } else {
        text_ += c == ':' || c == ',' ? "\n" : ""; // literals side by side are one text
        ++at_;
      }
    }
    return std::move(text_);
  }

 private:
  void literal(char quote, bool raw) {
    std::string triple(3, quote);
    std::string end = source_.compare(at_, 3, triple) == 0 ? triple : std::string(1, quote);
    at_ += end.size();
    while (at_ < source_.size() && source_.compare(at_, end.size(), end) != 0) {
      if (source_[at_] == '\\' && at_ + 1 < source_.size() && !raw) {
        text_ += unescape(source_[at_ + 1]);
        at_ += 2;
      } else {
        text_ += source_[at_++];
      }
    }
    at_ += end.size();
  }

  static std::string unescape(char c) {
    switch (c) {
      case 'n':
        return "\n";
      case 't':
        return "\t";
      case '\n':
        return "";
      case '\\':
      case '\'':
      case '"':
        return {c};
      default:
        return {'\\', c};
    }
  }

  const std::string& source_;
  size_t at_ = 0;
  std::string text_;
};

} // namespace

std::string python_literals(const std::string& source) {
  return LiteralReader(source).read();
}

Text load_text(const std::string& path) {
  if (!path.empty()) {
    return {path, read_file(path)};
  }
  std::string topics = find_python_topics();
  return {topics, python_literals(read_file(topics))};
}

} // namespace train_gpt
