#include "timeline.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace fsdp_report {
namespace {

using Json = nlohmann::json;

std::string contents_of(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) {
    throw std::runtime_error("cannot read '" + file + "': " + std::strerror(errno));
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

Json parsed(const std::string& text) {
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// Each event is a line. A process that was killed leaves no end, and its last line may be a part of one.
Json events_of(const std::string& file) {
  const std::string text = contents_of(file);
  Json events = parsed(text);
  if (events.is_discarded()) {
    events = parsed(text + "]");
  }
  if (events.is_discarded()) {
    events = parsed(text.substr(0, text.rfind(",\n")) + "]");
  }
  if (!events.is_array()) {
    throw std::runtime_error("'" + file + "' is not a trace: expected what FSDP_TRACE=FILE wrote");
  }
  return events;
}

void add(const Json& event, Timeline& timeline) {
  Rank& rank = timeline.ranks[event.at("pid").get<int>()];
  const std::string kind = event.at("ph");
  if (kind == "X") {
    const Json& details = event.at("args");
    rank.spans.push_back(
        {event.at("name"),
         details.at("unit"),
         event.at("tid"),
         details.value("peer", -1),
         event.at("ts"),
         event.at("dur")});
  } else if (kind == "C") {
    const Json& bytes = event.at("args");
    rank.memory.push_back({event.at("ts"), bytes.at("whole parameters"), bytes.at("gradients"), bytes.at("bound")});
  }
}

void start_at_zero(Timeline& timeline) {
  double first = std::numeric_limits<double>::infinity();
  for (const auto& [_, rank] : timeline.ranks) {
    for (const Span& span : rank.spans) {
      first = std::min(first, span.begin);
    }
    for (const Memory& memory : rank.memory) {
      first = std::min(first, memory.time);
    }
  }
  for (auto& [_, rank] : timeline.ranks) {
    for (Span& span : rank.spans) {
      span.begin -= first;
    }
    for (Memory& memory : rank.memory) {
      memory.time -= first;
    }
  }
}

/// Gives each text a number, to write it once.
class Names {
 public:
  size_t number(const std::string& name) {
    const auto [at, is_new] = numbers_.emplace(name, names_.size());
    if (is_new) {
      names_.push_back(name);
    }
    return at->second;
  }
  const std::vector<std::string>& all() const {
    return names_;
  }

 private:
  std::map<std::string, size_t> numbers_;
  std::vector<std::string> names_;
};

} // namespace

double Timeline::end() const {
  double end = 0;
  for (const auto& [_, rank] : ranks) {
    for (const Span& span : rank.spans) {
      end = std::max(end, span.begin + span.duration);
    }
  }
  return end;
}

Timeline read_traces(const std::vector<std::string>& files) {
  Timeline timeline;
  for (const std::string& file : files) {
    try {
      for (const Json& event : events_of(file)) {
        add(event, timeline);
      }
    } catch (const Json::exception& error) {
      throw std::runtime_error("'" + file + "' is not a trace of libfsdp: " + error.what());
    }
  }
  start_at_zero(timeline);
  return timeline;
}

std::vector<UnitWaits> waits_by_unit(const Timeline& timeline) {
  std::map<std::string, UnitWaits> units;
  for (const auto& [_, rank] : timeline.ranks) {
    for (const Span& span : rank.spans) {
      if (span.waits()) {
        UnitWaits& unit = units[span.unit];
        unit.unit = span.unit;
        ++unit.waits;
        unit.waited += span.duration;
        unit.longest = std::max(unit.longest, span.duration);
        unit.by_peer[span.peer] += span.duration;
      }
    }
  }
  std::vector<UnitWaits> sorted;
  for (auto& [_, unit] : units) {
    sorted.push_back(std::move(unit));
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.waited > b.waited; });
  return sorted;
}

Json to_json(const Timeline& timeline) {
  Names names;
  Json ranks = Json::array();
  for (const auto& [number, rank] : timeline.ranks) {
    Json spans = Json::array(), memory = Json::array();
    for (const Span& span : rank.spans) {
      spans.push_back(
          {span.begin, span.duration, names.number(span.name), names.number(span.unit), span.thread, span.peer});
    }
    for (const Memory& moment : rank.memory) {
      memory.push_back({moment.time, moment.whole, moment.gradients, moment.bound});
    }
    ranks.push_back({{"rank", number}, {"spans", std::move(spans)}, {"memory", std::move(memory)}});
  }
  Json units = Json::array();
  for (const UnitWaits& unit : waits_by_unit(timeline)) {
    Json peers = Json::array();
    for (const auto& [peer, waited] : unit.by_peer) {
      peers.push_back({peer, waited});
    }
    units.push_back(
        {{"unit", unit.unit},
         {"waits", unit.waits},
         {"waited", unit.waited},
         {"longest", unit.longest},
         {"peers", std::move(peers)}});
  }
  return {{"end", timeline.end()}, {"names", names.all()}, {"ranks", std::move(ranks)}, {"units", std::move(units)}};
}

} // namespace fsdp_report
