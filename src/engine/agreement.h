#pragma once

#include <optional>
#include <string>
#include <vector>

#include <fsdp/group.h>

namespace fsdp::engine {

struct OtherText {
  int rank; ///< the first that says something else
  std::string text;
};

/// Nothing if all ranks give the same text. Each sends as much, however long it is, unless they differ. Collective.
std::optional<OtherText> find_other_text(Group& group, const std::string& text, const Label& label);

/// The same for several texts at once.
std::vector<std::optional<OtherText>> find_other_texts(
    Group& group, const std::vector<std::string>& texts, const Label& label);

} // namespace fsdp::engine
