#include "base/tracing.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/env.h"
#include "base/log.h"

namespace fsdp::tracing {
namespace {

constexpr size_t kFlushAt = 1 << 20;

int64_t wall_clock() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

int rank() {
  return std::max(log::rank(), 0);
}

// Small numbers, in the order in which threads first record something.
int thread_number() {
  static std::atomic<int> threads{0};
  thread_local const int number = threads++;
  return number;
}

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      json += '\\';
    }
    json += static_cast<unsigned char>(character) < ' ' ? ' ' : character;
  }
  return json + '"';
}

// Microseconds with three decimals, without the rounding of a double.
std::string microseconds(int64_t nanoseconds) {
  std::array<char, 32> text{};
  std::snprintf(
      text.data(),
      text.size(),
      "%lld.%03lld",
      static_cast<long long>(nanoseconds / 1000),
      static_cast<long long>(nanoseconds % 1000));
  return text.data();
}

std::string place() {
  return "\"pid\":" + std::to_string(rank()) + ",\"tid\":" + std::to_string(thread_number());
}

std::string with_rank(const std::string& file) {
  const std::filesystem::path path(file);
  const std::string name = path.stem().string() + ".rank" + std::to_string(rank()) + path.extension().string();
  return path.parent_path() / name;
}

/// An array of JSON objects. Complete only once it is closed; readers accept what a killed process leaves.
class Writer {
 public:
  explicit Writer(const std::string& path) : file_(std::fopen(path.c_str(), "w"), &std::fclose) {
    FSDP_CHECK(
        file_ != nullptr,
        "[trace] cannot write '{}': {}. Name a file in a folder that exists",
        path,
        std::strerror(errno));
    add("{\"name\":\"process_name\",\"ph\":\"M\"," + place() + ",\"args\":{\"name\":\"rank " + std::to_string(rank()) +
        "\"}}");
  }
  ~Writer() {
    buffer_ += "\n]\n";
    flush();
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void add(const std::string& event) {
    buffer_ += std::exchange(before_, ",\n");
    buffer_ += event;
    if (buffer_.size() >= kFlushAt) {
      flush();
    }
  }

  void flush() {
    std::fwrite(buffer_.data(), 1, buffer_.size(), file_.get());
    std::fflush(file_.get());
    buffer_.clear();
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  std::string buffer_;
  const char* before_ = "[\n";
};

struct Recorder {
  std::mutex mutex;
  std::unique_ptr<Writer> writer; // null while nothing is recorded

  ~Recorder() {
    detail::on = false; // events may still come while the program ends
  }
};

Recorder& recorder() {
  static Recorder recorder;
  return recorder;
}

void add(const std::string& event) {
  std::scoped_lock lock(recorder().mutex);
  if (recorder().writer != nullptr) {
    recorder().writer->add(event);
  }
}

} // namespace

void start(const std::string& file) {
  std::scoped_lock lock(recorder().mutex);
  FSDP_CHECK(recorder().writer == nullptr, "[trace] a trace is being recorded already: end it before the next begins");
  recorder().writer = std::make_unique<Writer>(with_rank(file));
  detail::on = true;
}

void start_if_asked() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (const auto file = env::string("FSDP_TRACE")) {
      start(*file);
    }
  });
}

void stop() {
  std::scoped_lock lock(recorder().mutex);
  detail::on = false;
  recorder().writer.reset();
}

void flush() {
  std::scoped_lock lock(recorder().mutex);
  if (recorder().writer != nullptr) {
    recorder().writer->flush();
  }
}

int64_t Span::now() {
  return wall_clock();
}

void Span::record() const {
  const int64_t end = now();
  std::string event = "{\"name\":\"";
  event += operation_;
  event += "\",\"ph\":\"X\",\"ts\":" + microseconds(begin_) + ",\"dur\":" + microseconds(end - begin_) + "," + place();
  event += ",\"args\":{\"unit\":" + quoted(*unit_);
  if (peer_ != kNoPeer) {
    event += ",\"peer\":" + std::to_string(peer_);
  }
  add(event + "}}");
}

void record_memory(const Memory& memory) {
  add("{\"name\":\"memory\",\"ph\":\"C\",\"ts\":" + microseconds(wall_clock()) + "," + place() +
      ",\"args\":{\"whole parameters\":" + std::to_string(memory.whole) +
      ",\"gradients\":" + std::to_string(memory.gradients) + ",\"bound\":" + std::to_string(memory.bound) + "}}");
}

} // namespace fsdp::tracing
