#include "nn/checkpointed_modules.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include <c10/util/Type.h>

#include <fsdp/call.h>
#include <fsdp/checkpoint.h>

#include "base/check.h"
#include "base/log.h"
#include "nn/choose_modules.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

struct Mark {
  std::weak_ptr<const torch::nn::Module> module; // its address may be used again
  std::string path;
  std::atomic<bool> was_called = false; // through its boundary; or else it was warned of
};

std::mutex marks_mutex;
std::unordered_map<const torch::nn::Module*, std::shared_ptr<Mark>> marks;
std::atomic<bool> any_marks = false;

std::shared_ptr<Mark> mark_of(const torch::nn::Module& module) {
  std::lock_guard lock(marks_mutex);
  const auto found = marks.find(&module);
  return found == marks.end() || found->second->module.expired() ? nullptr : found->second;
}

// Nothing tells of a call that is not seen, but that its parameters get gradients.
void notice_unseen_calls(torch::nn::Module& module, const std::shared_ptr<Mark>& mark) {
  for (const auto& slot : nn::slots_of(module)) {
    if (slot.tensor.requires_grad()) {
      slot.tensor.register_hook([weak = std::weak_ptr(mark), name = slot.path](const at::Tensor&) {
        const auto seen = weak.lock();
        if (seen && !seen->was_called.exchange(true)) {
          log::warn(
              "[apply_activation_checkpointing] '{}' was chosen and its '{}' has a gradient, but no call of it was "
              "seen, so nothing was checkpointed: call it by fsdp::call(module, ...), or declare its holder with "
              "FSDP_MODULE",
              seen->path,
              name);
        }
      });
      return;
    }
  }
}

void mark_module(torch::nn::Module& module, const std::string& path) {
  if (mark_of(module) != nullptr) {
    return;
  }
  const auto mark = std::make_shared<Mark>();
  mark->module = module.weak_from_this();
  mark->path = path;
  {
    std::lock_guard lock(marks_mutex);
    std::erase_if(marks, [](const auto& item) { return item.second->module.expired(); });
    marks[&module] = mark;
  }
  any_marks = true;
  notice_unseen_calls(module, mark);
}

} // namespace

bool nn::begins_checkpoint(const torch::nn::Module& module) {
  const auto mark = any_marks ? mark_of(module) : nullptr;
  if (mark) {
    mark->was_called = true;
  }
  return mark != nullptr;
}

std::vector<std::string> apply_activation_checkpointing(ModuleRef given, const AutoWrapPolicy& policy) {
  std::vector<std::string> paths;
  for (const auto& chosen : nn::choose_modules(given.for_operation("apply_activation_checkpointing"), policy)) {
    mark_module(*chosen.module, chosen.path);
    paths.push_back(chosen.path);
  }
  return paths;
}

void detail::refuse_checkpoint(const char* module_type, const char* value_types) {
  fail(
      "[apply_activation_checkpointing] expected a forward of {} whose arguments and results are tensors, numbers and "
      "strings, or optionals, vectors, pairs and tuples of them, got {}: others may hold tensors of which a checkpoint "
      "would not know, so let the policy leave this module out, or give it tensors",
      c10::demangle(module_type),
      c10::demangle(value_types));
}

} // namespace fsdp
