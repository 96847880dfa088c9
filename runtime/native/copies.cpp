// Copies between KV cache pools, and between a pool and a buffer. `__init__.py` documents the arguments.

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr long LINE = 64;

// Bypasses the caches: what is written is not read soon, so its cache lines need not be fetched first.
void copy_past(char *to, const char *from, long bytes) {
#if defined(__AVX2__)
    const long head = std::min<long>(-reinterpret_cast<uintptr_t>(to) & (LINE - 1), bytes);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= LINE; to += LINE, from += LINE, bytes -= LINE) {
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to), _mm512_loadu_si512(from));
#else
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from) + 1);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to), first);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to) + 1, second);
#endif
    }
#endif
    std::memcpy(to, from, bytes);
}

void copy_near(char *to, const char *from, long bytes) { std::memcpy(to, from, bytes); }

} // namespace

extern "C" void copy_tokens(char *to, long to_plane, long to_row, const char *from, long from_plane,
                            long from_row, long planes, long item, const int64_t *to_runs, long to_count,
                            const int64_t *from_runs, long from_count, long past_caches) {
    const auto copy = past_caches ? copy_past : copy_near;
    const bool whole_rows = to_row == item && from_row == item;
    for (long plane = 0; plane < planes; ++plane, to += to_plane, from += from_plane) {
        long source = 0, at = 0, end = 0;
        for (long run = 0; run < to_count; ++run) {
            long slot = to_runs[2 * run];
            const long last = to_runs[2 * run + 1];
            while (slot < last) {
                if (at == end) {
                    if (source == from_count) return;
                    at = from_runs[2 * source], end = from_runs[2 * source + 1], ++source;
                }
                const long tokens = std::min(last - slot, end - at);
                if (whole_rows) {
                    copy(to + slot * to_row, from + at * from_row, tokens * item);
                } else {
                    for (long token = 0; token < tokens; ++token)
                        copy(to + (slot + token) * to_row, from + (at + token) * from_row, item);
                }
                slot += tokens, at += tokens;
            }
        }
    }
#if defined(__AVX2__)
    if (past_caches) _mm_sfence();
#endif
}
