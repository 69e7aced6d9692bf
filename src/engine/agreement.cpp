#include "engine/agreement.h"

#include <algorithm>

#include <c10/util/hash.h>

#include "base/phrase.h"

namespace fsdp::engine {
namespace {

/// Every rank has the same list, so all of them go on to exchange the texts, or none.
bool all_equal(const std::vector<std::string>& items) {
  return std::adjacent_find(items.begin(), items.end(), std::not_equal_to<>()) == items.end();
}

} // namespace

std::optional<OtherText> find_other_text(Group& group, const std::string& text, const Label& label) {
  const std::string digest = c10::sha1(phrase("{} {}", text.size(), text)).str(); // of nothing it has none
  if (group.size() == 1 || all_equal(group.exchange(digest, label))) {
    return std::nullopt;
  }
  const auto texts = group.exchange(text, label);
  const auto other = std::find_if(texts.begin(), texts.end(), [&](const auto& theirs) { return theirs != text; });
  return OtherText{static_cast<int>(other - texts.begin()), *other};
}

} // namespace fsdp::engine
