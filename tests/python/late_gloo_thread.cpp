// Preloaded: Gloo's threads want a core that others have. Always before they ask for Python's lock; once GLOO_IS_LATE
// is set, longer, and before any other lock too, and so between a collective's end and its tensors' release.

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>

namespace {

bool is_gloos_thread() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  return std::string_view(name.data()) == "pt_gloo_runloop";
}

void spend(std::chrono::milliseconds time) {
  for (const auto end = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < end;) {
  }
}

template <typename Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

} // namespace

// NOLINTBEGIN(readability-identifier-naming): others' names
extern "C" [[gnu::visibility("default")]] void PyEval_AcquireThread(void* state) {
  if (is_gloos_thread()) {
    spend(std::chrono::milliseconds(30));
  }
  original<void(void*)>(__func__)(state);
}

extern "C" [[gnu::visibility("default")]] int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static auto* const lock = original<int(pthread_mutex_t*)>(__func__);
  if (is_gloos_thread() && std::getenv("GLOO_IS_LATE") != nullptr) {
    spend(std::chrono::milliseconds(60));
  }
  return lock(mutex);
}
// NOLINTEND(readability-identifier-naming)
