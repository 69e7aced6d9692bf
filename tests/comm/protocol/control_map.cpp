#include "comm/protocol/control_map.h"

#include <map>

namespace fsdp::testing {

using shm::RankSlot;

std::string name_of(size_t offset) {
  static const std::map<size_t, std::string> names{
      {offset_of(&RankSlot::bell), "bell"},
      {offset_of(&RankSlot::wakes_for), "wakes_for"},
      {offset_of(&RankSlot::waits_for), "waits_for"},
      {offset_of(&RankSlot::left), "left"},
      {offset_of(&RankSlot::posted), "posted"},
      {offset_of(&RankSlot::finished), "finished"},
      {offset_of(&RankSlot::writing), "writing"},
      {offset_of(&RankSlot::published), "published"},
      {offset_of(&RankSlot::opened), "opened"},
      {offset_of(&RankSlot::closed), "closed"},
      {offset_of(&RankSlot::looked), "looked"},
      {offset_of(&RankSlot::heard), "heard"},
      {offset_of(&RankSlot::reading), "reading"}};
  const auto found = names.find(offset);
  return found != names.end() ? found->second : "field at " + std::to_string(offset);
}

} // namespace fsdp::testing
