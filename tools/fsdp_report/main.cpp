// Turns the traces of a job's ranks into one page that needs no network.
#include <cstdio>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "timeline.h"

namespace fsdp_report {

extern const char* const kPage; // page.html, made a string by the build

namespace {

constexpr const char* kHelp =
    R"(Turns traces into one HTML page: a timeline of all ranks, their memory beside the predicted bound, and the units that
were waited for longest.

    FSDP_TRACE=trace.json scripts/launch -n 2 build/bin/train_gpt --steps 20
    fsdp-report trace.rank*.json            # writes fsdp-report.html

Usage: fsdp-report [--output FILE] TRACE...
  --output FILE   the page (default: fsdp-report.html)
  --help          this text
)";

struct Options {
  std::vector<std::string> traces;
  std::string output = "fsdp-report.html";
  bool help = false;
};

Options parse(const std::vector<std::string>& arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--help" || arguments[i] == "-h") {
      options.help = true;
    } else if (arguments[i] == "--output" && i + 1 < arguments.size()) {
      options.output = arguments[++i];
    } else if (arguments[i].starts_with("-")) {
      throw std::runtime_error("unknown option '" + arguments[i] + "': see --help");
    } else {
      options.traces.push_back(arguments[i]);
    }
  }
  if (options.traces.empty() && !options.help) {
    throw std::runtime_error("expected the traces that FSDP_TRACE=FILE wrote: see --help");
  }
  return options;
}

/// JSON that may stand inside a <script> element.
std::string embeddable(const nlohmann::json& data) {
  std::string text = data.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) {
    text.replace(at, 1, "\\u003c");
  }
  return text;
}

void write_page(const Timeline& timeline, const std::string& path) {
  std::string page = kPage;
  const std::string place = "{{timeline}}";
  page.replace(page.find(place), place.size(), embeddable(to_json(timeline)));
  std::ofstream file(path);
  if (!(file << page << std::flush)) {
    throw std::runtime_error("cannot write '" + path + "': name another file with --output");
  }
}

std::string most_waited_for(const UnitWaits& unit) {
  auto most = unit.by_peer.begin();
  for (auto at = unit.by_peer.begin(); at != unit.by_peer.end(); ++at) {
    most = at->second > most->second ? at : most;
  }
  return most->first < 0 ? "" : "rank " + std::to_string(most->first);
}

void print_waits(const Timeline& timeline) {
  constexpr size_t kShown = 10;
  const auto units = waits_by_unit(timeline);
  std::printf("%zu ranks, %.1f ms\n", timeline.ranks.size(), timeline.end() / 1e3);
  std::printf("%-32s %10s %8s %12s  %s\n", "waited for", "ms", "times", "longest ms", "mostly for");
  for (size_t i = 0; i < std::min(kShown, units.size()); ++i) {
    std::printf(
        "%-32s %10.2f %8lld %12.2f  %s\n",
        units[i].unit.empty() ? "(no unit)" : units[i].unit.c_str(),
        units[i].waited / 1e3,
        static_cast<long long>(units[i].waits),
        units[i].longest / 1e3,
        most_waited_for(units[i]).c_str());
  }
}

void run(const Options& options) {
  const Timeline timeline = read_traces(options.traces);
  print_waits(timeline);
  write_page(timeline, options.output);
  std::printf("Report: %s\n", options.output.c_str());
}

} // namespace
} // namespace fsdp_report

int main(int argc, char** argv) {
  try {
    const auto options = fsdp_report::parse({argv + 1, argv + argc});
    if (options.help) {
      std::cout << fsdp_report::kHelp;
    } else {
      fsdp_report::run(options);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "fsdp-report: " << error.what() << '\n';
    return 1;
  }
}
