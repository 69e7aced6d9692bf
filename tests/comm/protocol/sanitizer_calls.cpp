#include "comm/protocol/watched.h"

/// What gcc and clang call in code compiled with -fsanitize=thread. See [Note: watched code].
namespace {

using namespace fsdp::testing::watched;

template <typename T>
T load(const volatile T* from) {
  const auto* address = const_cast<const T*>(from);
  const Verdict verdict = before_atomic(address, sizeof(T), Kind::kRead);
  const T value = verdict == Verdict::kReadMost ? static_cast<T>(~T{0}) : __atomic_load_n(from, __ATOMIC_SEQ_CST);
  after_read(address, value);
  return value;
}

template <typename T>
void store(volatile T* to, T value) {
  auto* address = const_cast<T*>(to);
  if (before_atomic(address, sizeof(T), Kind::kWrite) != Verdict::kDrop) {
    __atomic_store_n(to, value, __ATOMIC_SEQ_CST);
  }
  after_write(address, value);
}

template <typename T, typename Change>
T change(volatile T* at, const Change& change) {
  auto* address = const_cast<T*>(at);
  before_atomic(address, sizeof(T), Kind::kWrite);
  const T before = change();
  after_read(address, before);
  after_write(address, *at);
  return before;
}

template <typename T>
bool compare_exchange(volatile T* at, T* expected, T desired) {
  auto* address = const_cast<T*>(at);
  before_atomic(address, sizeof(T), Kind::kWrite);
  const bool done = __atomic_compare_exchange_n(at, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  after_read(address, done ? 1 : 0);
  after_write(address, *at);
  return done;
}

} // namespace

// NOLINTBEGIN(bugprone-reserved-identifier)
#define ATOMICS(bits, T)                                                                  \
  T __tsan_atomic##bits##_load(const volatile T* a, int) {                                \
    return load(a);                                                                       \
  }                                                                                       \
  void __tsan_atomic##bits##_store(volatile T* a, T v, int) {                             \
    store(a, v);                                                                          \
  }                                                                                       \
  T __tsan_atomic##bits##_exchange(volatile T* a, T v, int) {                             \
    return change(a, [&] { return __atomic_exchange_n(a, v, __ATOMIC_SEQ_CST); });        \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_add(volatile T* a, T v, int) {                            \
    return change(a, [&] { return __atomic_fetch_add(a, v, __ATOMIC_SEQ_CST); });         \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_sub(volatile T* a, T v, int) {                            \
    return change(a, [&] { return __atomic_fetch_sub(a, v, __ATOMIC_SEQ_CST); });         \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_and(volatile T* a, T v, int) {                            \
    return change(a, [&] { return __atomic_fetch_and(a, v, __ATOMIC_SEQ_CST); });         \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_or(volatile T* a, T v, int) {                             \
    return change(a, [&] { return __atomic_fetch_or(a, v, __ATOMIC_SEQ_CST); });          \
  }                                                                                       \
  T __tsan_atomic##bits##_fetch_xor(volatile T* a, T v, int) {                            \
    return change(a, [&] { return __atomic_fetch_xor(a, v, __ATOMIC_SEQ_CST); });         \
  }                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* c, T v, int, int) { \
    return compare_exchange(a, c, v);                                                     \
  }                                                                                       \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* c, T v, int, int) {   \
    return compare_exchange(a, c, v);                                                     \
  }

#define PLAIN(bytes)                            \
  void __tsan_read##bytes(void*) {}             \
  void __tsan_unaligned_read##bytes(void*) {}   \
  void __tsan_write##bytes(void* a) {           \
    before_plain_write(a);                      \
  }                                             \
  void __tsan_unaligned_write##bytes(void* a) { \
    before_plain_write(a);                      \
  }

extern "C" {
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
void __tsan_read_range(void*, size_t) {}
void __tsan_write_range(void* a, size_t) {
  before_plain_write(a);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}
void __tsan_init() {}
}
// NOLINTEND(bugprone-reserved-identifier)
