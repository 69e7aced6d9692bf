#include "checkpoint/all_agree.h"

#include <algorithm>
#include <string>

#include <c10/util/Exception.h>

#include <fsdp/init.h>

#include "base/check.h"
#include "checkpoint/quietly.h"

namespace fsdp::disk {

namespace {

/// What went wrong here; empty if nothing did.
std::string error_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const CommError&) {
    throw; // there is no group to talk to
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? "an error without a text" : text;
  }
}

} // namespace

std::shared_ptr<Group> group_or_world(const std::shared_ptr<Group>& given) {
  if (given) {
    return given;
  }
  static const auto alone = group_of_one();
  return is_initialized() ? world() : alone;
}

void all_agree(
    Group& group, const Label& label, const std::function<void()>& body, const std::function<void()>& clean_up) {
  const auto errors = group.exchange(error_of(body), label);
  const bool failed = std::any_of(errors.begin(), errors.end(), [](const auto& error) { return !error.empty(); });
  if (failed && clean_up && group.rank() == 0) {
    quietly(clean_up);
  }
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    FSDP_CHECK(errors[rank].empty(), "[{}] rank {}: {}", label.operation, rank, errors[rank]);
  }
}

} // namespace fsdp::disk
