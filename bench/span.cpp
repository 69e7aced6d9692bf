// What a span of the engine's trace costs while nothing is traced: too little to be seen in the time of a step, so it
// is measured alone, in the library's own code.
#include "base/tracing.h"

#include "serve.h"

namespace {

double seconds_a_span() {
  constexpr int kTimes = 1'000'000;
  const std::string unit = "blocks.0";
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) {
    const fsdp::tracing::Span span("touch", unit);
  }
  return bench::seconds_since(start) / kTimes;
}

} // namespace

int main() {
  bench::serve({{"span", [](const bench::Json&) { return bench::Json(seconds_a_span()); }}});
}
