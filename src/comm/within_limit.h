#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

namespace fsdp {

/// A timeout that can be added to times, and given to systems that count milliseconds in 31 bits: who wants to wait
/// longer than three weeks waits that long.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(21 * 24));
}

/// Runs `work` on a thread of its own, which may outlive the caller, so that `work` owns what it uses. At exit the
/// process gives such threads five seconds to end: what they use of libraries goes then.
void in_background(std::function<void()> work);

/// A result that `work` makes in the background.
template <typename T>
std::future<T> made_in_background(std::function<T()> work) {
  const auto task = std::make_shared<std::packaged_task<T()>>(std::move(work));
  std::future<T> result = task->get_future();
  in_background([task] { (*task)(); });
  return result;
}

/// What `talk` returned or threw; nothing if it does not come back within `limit`. For talk with a store: its server
/// may have stopped, and then most calls wait for ever.
template <typename T>
std::optional<T> within_limit(std::chrono::milliseconds limit, std::function<T()> talk) {
  std::future<T> answer = made_in_background(std::move(talk));
  if (answer.wait_for(limit) != std::future_status::ready) {
    return std::nullopt;
  }
  return answer.get();
}

/// The same, but it is an error not to come back.
template <typename T>
T answer_of(std::chrono::milliseconds limit, std::function<T()> talk) {
  auto answer = within_limit<T>(limit, std::move(talk));
  TORCH_CHECK(answer, "the store of the rendezvous does not answer");
  return *std::move(answer);
}

} // namespace fsdp
