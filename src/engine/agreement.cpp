#include "engine/agreement.h"

#include <algorithm>

#include <c10/util/hash.h>

#include "base/phrase.h"

namespace fsdp::engine {
namespace {

std::string digest_of(const std::string& text) {
  return c10::sha1(phrase("{} {}", text.size(), text)).str(); // of nothing it has none
}

OtherText ask(Group& group, const std::string& text, const Label& label) {
  const auto texts = group.exchange(text, label);
  const auto other = std::find_if(texts.begin(), texts.end(), [&](const auto& theirs) { return theirs != text; });
  return {static_cast<int>(other - texts.begin()), *other};
}

} // namespace

// Every rank has the same list of digests, so all of them go on to exchange a text, or none.
std::vector<std::optional<OtherText>> find_other_texts(
    Group& group, const std::vector<std::string>& texts, const Label& label) {
  std::vector<std::optional<OtherText>> others(texts.size());
  if (group.size() == 1) {
    return others;
  }
  std::string mine;
  for (const auto& text : texts) {
    mine += digest_of(text);
  }
  const auto all = group.exchange(mine, label);
  const size_t length = mine.size() / texts.size(); // of each digest
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto differs = [&](const auto& theirs) {
      return theirs.compare(i * length, length, mine, i * length, length) != 0;
    };
    if (std::any_of(all.begin(), all.end(), differs)) {
      others[i] = ask(group, texts[i], label);
    }
  }
  return others;
}

} // namespace fsdp::engine
