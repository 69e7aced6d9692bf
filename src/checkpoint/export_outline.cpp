#include "checkpoint/export_outline.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "base/check.h"
#include "base/format.h"
#include "base/phrase.h"
#include "checkpoint/crc32c.h"

namespace fsdp::disk {

namespace {

using Lines = std::vector<std::string>;

/// A line for each tensor, in their order, from which all places in the files follow.
std::string outline(const std::vector<ExportFile>& files) {
  Lines lines;
  for (const auto& file : files) {
    for (size_t i = 0; i < file.header.tensors.size(); ++i) {
      const auto& tensor = file.header.tensors[i];
      const char* how = file.transposed[i] ? ", transposed" : "";
      lines.push_back(
          phrase("'{}' ({}, {}{}) in {}", tensor.name, tensor.dtype, c10::IntArrayRef(tensor.sizes), how, file.name));
    }
  }
  return join(lines, "\n");
}

std::string fingerprint(const std::string& text) {
  return phrase("{} {}", text.size(), crc32c(text.data(), text.size()));
}

Lines lines_of(const std::string& text) {
  Lines lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
  }
  return lines;
}

/// The first line that the other text lacks.
std::string first_of_its_own(const std::string& text, const std::string& other) {
  const Lines lines = lines_of(text), others = lines_of(other);
  const std::set<std::string> known(others.begin(), others.end());
  const auto found = std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return !known.contains(line); });
  return found == lines.end() ? "nothing else" : *found;
}

} // namespace

void expect_same_files(Group& group, const std::vector<ExportFile>& files, const Label& label) {
  const std::string mine = outline(files);
  const auto all = group.exchange(fingerprint(mine), label);
  const auto other = std::find_if(all.begin(), all.end(), [&](const auto& each) { return each != all.front(); });
  if (other == all.end()) {
    return;
  }
  const auto rank = static_cast<int>(other - all.begin());
  const bool is_asked = group.rank() == 0 || group.rank() == rank;
  const auto outlines = group.exchange(is_asked ? mine : "", label);
  const auto& first = outlines.front();
  const auto& second = outlines[static_cast<size_t>(rank)];
  fail(
      "[{}] expected the same tensors in the same order on all ranks, but the first one has {} and rank {} has {}: "
      "give the same model and the same options on all ranks",
      label.operation,
      first_of_its_own(first, second),
      rank,
      first_of_its_own(second, first));
}

} // namespace fsdp::disk
