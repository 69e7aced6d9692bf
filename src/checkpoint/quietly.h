#pragma once

#include <exception>

#include "base/log.h"

namespace fsdp::disk {

/// Does what is in the way of nothing if it fails: then there is a warning.
template <typename Body>
void quietly(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    log::warn("{}", error.what());
  }
}

} // namespace fsdp::disk
