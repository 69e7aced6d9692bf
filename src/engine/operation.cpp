#include "engine/operation.h"

#include <atomic>

namespace fsdp::engine {

namespace {

int64_t next_number() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

} // namespace

Operation::Operation(const c10::OperatorHandle& op) : op(op), number(next_number()) {}

// A tensor that is filled element by element has a long chain of them: one after another, and not each within the next.
Operation::~Operation() {
  static thread_local std::vector<std::shared_ptr<const Operation>>* ending = nullptr;
  std::vector<std::shared_ptr<const Operation>> here;
  const bool is_outermost = ending == nullptr;
  if (is_outermost) {
    ending = &here;
  }
  for (auto& tensor : tensors) {
    if (tensor) {
      ending->push_back(std::move(tensor->values));
    }
  }
  while (is_outermost && !here.empty()) {
    const auto next = std::move(here.back());
    here.pop_back();
  }
  if (is_outermost) {
    ending = nullptr;
  }
}

int index_of_argument(const c10::FunctionSchema& schema, const char* name) {
  const auto index = schema.argumentIndexWithName(name);
  return index ? *index : -1;
}

} // namespace fsdp::engine
