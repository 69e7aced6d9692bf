#include "checkpoint/stream_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fsdp::disk {

void stream_copy(void* to, const void* from, size_t bytes) {
  auto* place = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
#if defined(__SSE2__)
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  for (; aligned && bytes >= 64; bytes -= 64, place += 64, source += 64) {
    for (size_t i = 0; i < 64; i += 16) {
      const auto value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(place + i), value);
    }
  }
  _mm_sfence(); // or a thread that is told of them might not see them
#endif
  std::memcpy(place, source, bytes);
}

} // namespace fsdp::disk
