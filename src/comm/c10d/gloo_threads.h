#pragma once

namespace fsdp {

/// Gloo's threads, which look after connections, try again and again where another thread holds a connection's lock.
/// From now on those of this process do not take the processor from that one when they wake: where ranks share cores,
/// small collectives cost half as much. Threads that the program has scheduled in a way of its own keep it.
void let_gloo_threads_stand_back();

} // namespace fsdp
