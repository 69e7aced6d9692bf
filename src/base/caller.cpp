#include "base/caller.h"

namespace fsdp {

namespace {

Caller the_caller;

} // namespace

void set_caller(Caller caller) {
  the_caller = caller;
}

WithoutCallersLock::WithoutCallersLock() : token_(the_caller.let_go != nullptr ? the_caller.let_go() : nullptr) {}

WithoutCallersLock::~WithoutCallersLock() {
  if (token_ != nullptr) {
    the_caller.take_back(token_);
  }
}

std::exception_ptr callers_interruption() {
  return the_caller.interruption != nullptr ? the_caller.interruption() : nullptr;
}

void raise_interruption_later(std::exception_ptr error) {
  if (the_caller.raise_later != nullptr) {
    the_caller.raise_later(std::move(error));
  }
}

void raise_to_caller() {
  if (the_caller.raise != nullptr) {
    the_caller.raise(std::current_exception());
  }
  throw;
}

} // namespace fsdp
