#include "comm/within_limit.h"

#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace fsdp {

std::optional<std::string> within_limit(std::chrono::milliseconds limit, std::function<std::string()> talk) {
  const auto task = std::make_shared<std::packaged_task<std::string()>>(std::move(talk));
  std::future<std::string> answer = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (answer.wait_for(limit) != std::future_status::ready) {
    return std::nullopt;
  }
  return answer.get();
}

} // namespace fsdp
