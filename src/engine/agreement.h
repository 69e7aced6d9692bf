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

/// For each text nothing if all ranks give the same. Each sends as much, however long they are, unless they differ.
/// Collective.
std::vector<std::optional<OtherText>> find_other_texts(
    Group& group, const std::vector<std::string>& texts, const Label& label);

} // namespace fsdp::engine
