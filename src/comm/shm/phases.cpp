#include "comm/shm/phases.h"

namespace fsdp::shm {

void Phases::begin_write(const Label& label) {
  members_.begin(label);
  ++phase_;
  members_.publish(members_.mine().*entered_, phase_);
  members_.await_all(entered_, phase_, label);
  writing_ = true;
}

void Phases::publish_writes() {
  if (writing_) {
    writing_ = false;
    members_.publish(members_.mine().*left_, phase_);
  }
}

void Phases::await_readable(const Label& label) {
  if (readable_ < phase_) {
    members_.await_all(left_, phase_, label);
    readable_ = phase_;
  }
}

void Phases::resume(bool all_were_writing) {
  readable_ = phase_; // whoever was writing has published
  if (all_were_writing) {
    members_.publish(members_.mine().*entered_, ++phase_);
    writing_ = true;
  }
}

} // namespace fsdp::shm
