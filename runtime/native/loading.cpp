// Reading slices of files, and laying out weights in panels. `loading.py` documents the arguments.

#include "vectors.h"

#include <algorithm>
#include <cerrno>
#include <sys/mman.h>
#include <unistd.h>

namespace {

enum Type { FLOAT32, FLOAT16, BFLOAT16 };
constexpr long BYTES[] = {4, 2, 2};

// LANES values of a type as floats.
inline Floats as_floats(const char *from, Type type) {
    if (type == FLOAT32) return load(reinterpret_cast<const float *>(from));
    const uint16_t *const halves = reinterpret_cast<const uint16_t *>(from);
    if (type == BFLOAT16) return as_floats(widened(halves) << 16);
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves)));
#else
    return from_float16(widened(halves));
#endif
}

// A square of values, so that its lines become its columns.
inline void transpose(Floats (&square)[LANES]) {
    Ints lane;
    for (int at = 0; at < LANES; ++at) lane[at] = at;
    for (int step = LANES / 2; step > 0; step /= 2) {
        const Ints upper = (lane & step) != 0; // -1 or 0
        const Ints low = (upper & (LANES + lane - step)) | (~upper & lane);
        const Ints high = (upper & (LANES + lane)) | (~upper & (lane + step));
        for (int at = 0; at < LANES; ++at) {
            if (at & step) continue;
            const Floats first = square[at], second = square[at + step];
            square[at] = __builtin_shuffle(first, second, low);
            square[at + step] = __builtin_shuffle(first, second, high);
        }
    }
}

// Past the caches where a vector is a whole line: weights are read much later.
inline void put(float *to, const Floats &values) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)values);
#else
    store(to, values);
#endif
}

// LANES rows, whose values go to the same lanes of a panel.
template <Type TYPE> void pack_lanes(float *to, const char *from, long row_bytes, long inputs) {
    long at = 0;
    for (; at + LANES <= inputs; at += LANES) {
        Floats square[LANES];
#pragma GCC unroll 16
        for (int row = 0; row < LANES; ++row)
            square[row] = as_floats(from + row * row_bytes + at * BYTES[TYPE], TYPE);
        transpose(square);
#pragma GCC unroll 16
        for (int column = 0; column < LANES; ++column) put(to + (at + column) * PANEL, square[column]);
    }
    for (; at < inputs; ++at)
        for (int row = 0; row < LANES; ++row) {
            char padded[4 * LANES] = {};
            std::memcpy(padded, from + row * row_bytes + at * BYTES[TYPE], BYTES[TYPE]);
            to[at * PANEL + row] = as_floats(padded, TYPE)[0];
        }
}

// One row, whose values go to one lane of a panel.
template <Type TYPE> void pack_row(float *to, const char *from, long inputs) {
    for (long at = 0; at < inputs; at += LANES) {
        const long count = std::min<long>(LANES, inputs - at);
        char padded[4 * LANES] = {};
        std::memcpy(padded, from + at * BYTES[TYPE], count * BYTES[TYPE]);
        const Floats values = as_floats(padded, TYPE);
        for (long column = 0; column < count; ++column) to[(at + column) * PANEL] = values[column];
    }
}

// Get the pages of memory that is written next all at once: a fault for each takes half as long again. Kernels
// before 5.14 can't, and C libraries before them have no name for it.
void get_pages(float *first, float *end) {
    static const uintptr_t page = sysconf(_SC_PAGESIZE); // 4096 on x86; also 16 or 64 times 1024 on ARM
    constexpr int POPULATE_WRITE = 23;
    const uintptr_t start = reinterpret_cast<uintptr_t>(first) & -page;
    madvise(reinterpret_cast<void *>(start), reinterpret_cast<uintptr_t>(end) - start, POPULATE_WRITE);
}

template <Type TYPE>
void pack_all(float *panels, long inputs, long first, const char *from, long row_bytes, long rows) {
    const long size = PANEL * inputs;
    get_pages(panels + first / PANEL * size, panels + (first + rows + PANEL - 1) / PANEL * size);
    for (long row = 0; row < rows;) {
        const long output = first + row;
        float *const to = panels + output / PANEL * PANEL * inputs + output % PANEL;
        if (output % LANES == 0 && row + LANES <= rows) {
            pack_lanes<TYPE>(to, from + row * row_bytes, row_bytes, inputs);
            row += LANES;
        } else {
            pack_row<TYPE>(to, from + row * row_bytes, inputs);
            ++row;
        }
    }
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

} // namespace

extern "C" void pack_rows(float *panels, long inputs, long first, const char *from, long row_bytes, long rows,
                          long type) {
    const auto pack = type == FLOAT32 ? pack_all<FLOAT32> : type == FLOAT16 ? pack_all<FLOAT16> : pack_all<BFLOAT16>;
    pack(panels, inputs, first, from, row_bytes, rows);
}

extern "C" void pack_codes(uint8_t *panels, const uint8_t *from, long row_bytes, long rows, long inputs,
                           long is_packed, long flipped) {
    // Of some inputs at a time, so that all rows of a panel stay in the first cache.
    constexpr long INPUTS = 256;
    const long bytes = is_packed ? PANEL / 2 : PANEL;
    for (long first = 0; first < rows; first += PANEL, panels += bytes * inputs)
        for (long start = 0; start < inputs; start += INPUTS) {
            const long end = std::min(start + INPUTS, inputs);
            for (long lane = 0; lane < bytes; ++lane) {
                const uint8_t *const low = from + std::min(first + lane, rows - 1) * row_bytes;
                const uint8_t *const high = from + std::min(first + lane + PANEL / 2, rows - 1) * row_bytes;
                uint8_t *const to = panels + lane;
                if (is_packed)
                    for (long at = start; at < end; ++at) to[at * bytes] = low[at] | high[at] << 4;
                else
                    for (long at = start; at < end; ++at) to[at * bytes] = low[at] ^ flipped;
            }
        }
}

extern "C" long read_pieces(long file, long at, long step, long piece, long count, char *to) {
    if (step == piece) piece *= count, count = 1;
    for (long number = 0; number < count; ++number, at += step) {
        for (long done = 0; done < piece;) {
            const ssize_t read = pread(file, to, piece - done, at + done);
            if (read < 0 && errno == EINTR) continue;
            if (read <= 0) return read < 0 ? errno : -1;
            to += read, done += read;
        }
    }
    return 0;
}
