#include "checkpoint/run_folder.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>
#include <tuple>

#include "base/log.h"
#include "checkpoint/folder.h"
#include "checkpoint/quietly.h"

namespace fsdp::disk {

namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kUnfinished = ".tmp-step-";

/// The number at the beginning of `text`, which is taken off.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text[0] == '-') {
    return std::nullopt;
  }
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

/// The step, and which of its checkpoints it is.
std::optional<std::pair<int64_t, int64_t>> parse_name(std::string_view name) {
  if (!name.starts_with(kStep)) {
    return std::nullopt;
  }
  name.remove_prefix(kStep.size());
  const auto step = take_number(name);
  if (!step || name.empty()) {
    return step ? std::optional(std::pair(*step, int64_t{0})) : std::nullopt;
  }
  if (name[0] != '.') {
    return std::nullopt;
  }
  name.remove_prefix(1);
  const auto attempt = take_number(name);
  return attempt && name.empty() ? std::optional(std::pair(*step, *attempt)) : std::nullopt;
}

std::string name_of_step(int64_t step) {
  std::string digits = std::to_string(step);
  digits.insert(0, digits.size() < 8 ? 8 - digits.size() : 0, '0');
  return std::string(kStep) + digits;
}

} // namespace

std::vector<RunFolder::Entry> RunFolder::entries() const {
  std::vector<Entry> entries;
  for (const auto& name : names_in(path_)) {
    const auto numbers = parse_name(name);
    if (numbers && is_file(path_ + "/" + name + "/" + kIndexName)) {
      entries.push_back({numbers->first, numbers->second, name});
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.step, a.attempt, a.name) < std::tie(b.step, b.attempt, b.name);
  });
  return entries;
}

std::optional<std::string> RunFolder::latest() const {
  const auto all = entries();
  return all.empty() ? std::nullopt : std::optional(path_ + "/" + all.back().name);
}

std::string RunFolder::unfinished(int64_t step) const {
  return path_ + "/.tmp-" + name_of_step(step);
}

std::string RunFolder::begin(int64_t step) const {
  make_folders(path_);
  std::string begun = unfinished(step);
  remove_folder_tree(begun);
  remove_unfinished();
  make_folders(begun);
  return begun;
}

std::string RunFolder::finish(const std::string& begun, int64_t step) const {
  std::string name = name_of_step(step);
  std::vector<std::string> replaced;
  for (const auto& entry : entries()) {
    if (entry.step == step) {
      name = name_of_step(step) + "." + std::to_string(entry.attempt + 1);
      replaced.push_back(entry.name);
    } else if (entry.step > step) {
      log::warn(
          "{} has {}, of a later step than the {} that is saved: it goes on being the latest", path_, entry.name, step);
    }
  }
  flush_folder(begun);
  rename_path(begun, path_ + "/" + name);
  flush_folder(path_);
  for (const auto& old : replaced) {
    quietly([&] { remove(old); });
  }
  return path_ + "/" + name;
}

void RunFolder::keep_last(int64_t count, const std::string& kept) const {
  const auto all = entries();
  for (int64_t i = 0; i + count < static_cast<int64_t>(all.size()); ++i) {
    if (path_ + "/" + all[i].name != kept) {
      quietly([&] { remove(all[i].name); });
    }
  }
}

// Under another name first: what is partly removed is no checkpoint.
void RunFolder::remove(const std::string& name) const {
  const std::string aside = path_ + "/.tmp-" + name;
  remove_folder_tree(aside);
  rename_path(path_ + "/" + name, aside);
  flush_folder(path_);
  remove_folder_tree(aside);
}

void RunFolder::remove_unfinished() const {
  for (const auto& name : names_in(path_)) {
    if (name.starts_with(kUnfinished)) {
      quietly([&] { remove_folder_tree(path_ + "/" + name); });
    }
  }
}

} // namespace fsdp::disk
