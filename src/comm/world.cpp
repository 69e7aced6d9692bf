#include "comm/world.h"

#include <utility>

namespace fsdp {
namespace {

std::unique_ptr<World>& process_world() {
  static std::unique_ptr<World> world;
  return world;
}

thread_local const World* thread_world = nullptr;

} // namespace

const World* current_world() {
  return thread_world ? thread_world : process_world().get();
}

std::unique_ptr<World> exchange_process_world(std::unique_ptr<World> world) {
  return std::exchange(process_world(), std::move(world));
}

ThreadWorld::ThreadWorld(World world) : world_(std::move(world)), outer_(thread_world) {
  thread_world = &world_;
}

ThreadWorld::~ThreadWorld() {
  thread_world = outer_;
}

} // namespace fsdp
