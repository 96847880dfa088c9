// Copies between KV cache pools, and between a pool and a buffer. `tokens.py` documents the arguments.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr long LINE = 64, CHUNK = 4 * LINE;
// A long copy reads so many places at once, each at most so long: processors fetch ahead only within a page, so
// they are kept busier by several.
constexpr long PLACES = 4, PLACE = 16 * 4096;

// Bypasses the caches: what is written is not read soon, so its lines need not be fetched first.
inline void copy_chunk_past(char *to, const char *from) {
#if defined(__AVX512F__)
    for (long at = 0; at < CHUNK; at += LINE)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
#elif defined(__AVX2__)
    for (long at = 0; at < CHUNK; at += LINE / 2)
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + at),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + at)));
#else
    std::memcpy(to, from, CHUNK);
#endif
}

bool on_lines(const char *to, long step) { return ((reinterpret_cast<uintptr_t>(to) | step) & (LINE - 1)) == 0; }

// So many bytes from each place to another one, both `step` apart; the latter are `on_lines`.
void copy_places(char *to, long to_step, const char *from, long from_step, long bytes) {
    long at = 0;
    for (; at + CHUNK <= bytes; at += CHUNK)
        for (long place = 0; place < PLACES; ++place)
            copy_chunk_past(to + place * to_step + at, from + place * from_step + at);
    for (long place = 0; place < PLACES && at < bytes; ++place)
        std::memcpy(to + place * to_step + at, from + place * from_step + at, bytes - at);
}

void copy_past(char *to, const char *from, long bytes) {
    const long head = std::min<long>(-reinterpret_cast<uintptr_t>(to) & (LINE - 1), bytes);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    while (bytes >= PLACES * CHUNK) {
        const long place = std::min(bytes / PLACES / CHUNK * CHUNK, PLACE);
        copy_places(to, place, from, place, place);
        to += PLACES * place, from += PLACES * place, bytes -= PLACES * place;
    }
    for (; bytes >= CHUNK; to += CHUNK, from += CHUNK, bytes -= CHUNK) copy_chunk_past(to, from);
    std::memcpy(to, from, bytes);
}

void copy_near(char *to, const char *from, long bytes) { std::memcpy(to, from, bytes); }

} // namespace

extern "C" long count_tokens(const int64_t *runs, long count, long slots) {
    long tokens = 0;
    for (long run = 0; run < count; ++run) {
        const int64_t first = runs[2 * run], end = runs[2 * run + 1];
        if (first < 0 || end <= first || end > slots) return -1;
        tokens += end - first;
    }
    return tokens;
}

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
                    const long part = past_caches && on_lines(to, to_row) ? tokens / PLACES : 0;
                    for (long token = 0; token < part; ++token)
                        copy_places(to + (slot + token) * to_row, part * to_row,
                                    from + (at + token) * from_row, part * from_row, item);
                    for (long token = part * PLACES; token < tokens; ++token)
                        copy(to + (slot + token) * to_row, from + (at + token) * from_row, item);
                }
                slot += tokens, at += tokens;
            }
        }
    }
#if defined(__AVX2__)
    if (past_caches) _mm_sfence();
#endif
    // Whether the source was still valid is asked after this, so no read of it may come later.
    std::atomic_thread_fence(std::memory_order_acquire);
}
