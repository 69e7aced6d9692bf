#include <fsdp/group.h>

namespace fsdp {

Work::~Work() = default;
Gathered::~Gathered() = default;
Home::~Home() = default;
Group::~Group() = default;

std::shared_ptr<Group> Group::part(int color, const std::string& purpose, const Label& label) {
  auto& group = parts_[purpose];
  if (!group) {
    group = split(color, label);
  }
  return group;
}

} // namespace fsdp
