#include "base/callers_lock.h"

namespace fsdp {

namespace {

CallersLock callers_lock;

} // namespace

void set_callers_lock(CallersLock lock) {
  callers_lock = lock;
}

WithoutCallersLock::WithoutCallersLock() : token_(callers_lock.let_go != nullptr ? callers_lock.let_go() : nullptr) {}

WithoutCallersLock::~WithoutCallersLock() {
  if (token_ != nullptr) {
    callers_lock.take_back(token_);
  }
}

} // namespace fsdp
