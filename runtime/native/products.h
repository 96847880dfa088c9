// What products with weights in panels share, whatever the weights are: a function for each number of rows, the order
// of rows and panels, scales, and what threads share.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <vector>

namespace {

// How many rows are multiplied together where weights need registers on their way: 16 hold the sums of one row fewer.
constexpr int FEWER_ROWS = PRODUCT_ROWS == 6 ? 5 : PRODUCT_ROWS;

// Rows of x that pass all panels together, of so many bytes each, which stay in the L2 cache meanwhile; a multiple of
// `most`.
inline long block_of(long row_bytes, long most = PRODUCT_ROWS) {
    constexpr long BYTES = 1 << 19;
    return std::max(1L, BYTES / std::max(1L, row_bytes) / most) * most;
}

// Product::multiply<ROWS>, for each number of rows from 1 to MOST.
template <typename Product, int MOST = PRODUCT_ROWS> struct Multiplies {
    typedef decltype(&Product::template multiply<1>) Multiply;
    Multiply by_rows[MOST + 1] = {};

    constexpr Multiplies() { fill<MOST>(); }
    template <int ROWS> constexpr void fill() {
        by_rows[ROWS] = &Product::template multiply<ROWS>;
        if constexpr (ROWS > 1) fill<ROWS - 1>();
    }
};

template <typename Product, int MOST = PRODUCT_ROWS> constexpr Multiplies<Product, MOST> multiplies{};

// What is prefetched while a panel is used: where it begins, and how many bytes it goes on with each word of the panel.
struct Ahead {
    const char *at;
    long step;
};

constexpr long SHARING = 4; // groups of rows that share the next panel, so that memory is read all the time

// Calls run(panel, from, to, ahead) for rows [from, to), ROWS at most, of so many rows, with some of the panels of
// `size` words each. What is ahead is `near` words on in this panel, or, where several groups of rows use it, the
// next panel, of which the last groups prefetch equal parts.
template <int ROWS = PRODUCT_ROWS, typename Word, typename Run>
inline void for_panels(long rows, const Word *packed, long size, long near, long first_panel, long end_panel,
                       Run run) {
    constexpr long WHOLE = PANEL * sizeof(Word);
    const long groups = (rows + ROWS - 1) / ROWS, sharing = std::min(groups, SHARING);
    for (long panel = first_panel; panel < end_panel; ++panel)
        for (long group = 0; group < groups; ++group) {
            const Word *const own = packed + panel * size;
            const long turn = group - (groups - sharing);
            Ahead ahead{reinterpret_cast<const char *>(own + (groups == 1 ? near : 0)), WHOLE};
            if (groups > 1 && turn >= 0)
                ahead = {reinterpret_cast<const char *>(own + size + size * turn / sharing), WHOLE / sharing};
            run(panel, rows * group / groups, rows * (group + 1) / groups, ahead);
        }
}

// The rows that are multiplied together lie beside each other: the first pair of inputs of each, then the second.
struct Place {
    long first, rows, at; // the first of them, how many they are, and which of them a row is

    // That of a row, of `count` in blocks of `block`, as `for_panels` divides each into groups of `most` rows.
    Place(long row, long count, long block, long most = PRODUCT_ROWS) {
        const long begin = row / block * block, size = std::min(block, count - begin);
        const long groups = (size + most - 1) / most;
        long group = (row - begin) * groups / size;
        while (size * (group + 1) / groups <= row - begin) ++group;
        first = begin + size * group / groups;
        rows = begin + size * (group + 1) / groups - first;
        at = row - first;
    }
};

// Words of 32 bits of several rows, `width` each, beside each other: the first ones of all rows, then the second ones.
// read(row, at, found) reads one of them or, where `found` has room for them, four.
template <typename Word, typename Read> inline void lay_beside(long rows, long width, Read read, Word *to) {
    typedef Word Four __attribute__((vector_size(16)));
    typedef int32_t Order __attribute__((vector_size(16)));
    constexpr long LINE = 16; // words of a line of the cache, all of which are read from four rows at once
    const long whole = rows < 4 ? 0 : width / LINE * LINE;
    for (long first = 0; first < whole; first += LINE)
        for (long next = 0; next < rows; next += 4) {
            const long row = std::min(next, rows - 4);
            for (long at = first; at < first + LINE; at += 4) {
                Four a, b, c, d;
                read(row, at, a), read(row + 1, at, b), read(row + 2, at, c), read(row + 3, at, d);
                const Order low{0, 4, 1, 5}, high{2, 6, 3, 7}, former{0, 1, 4, 5}, latter{2, 3, 6, 7};
                const Four ab = __builtin_shuffle(a, b, low), cd = __builtin_shuffle(c, d, low);
                const Four more_ab = __builtin_shuffle(a, b, high), more_cd = __builtin_shuffle(c, d, high);
                const Four columns[] = {__builtin_shuffle(ab, cd, former), __builtin_shuffle(ab, cd, latter),
                                        __builtin_shuffle(more_ab, more_cd, former),
                                        __builtin_shuffle(more_ab, more_cd, latter)};
                for (int each = 0; each < 4; ++each)
                    std::memcpy(to + (at + each) * rows + row, &columns[each], sizeof(Four));
            }
        }
    for (long row = 0; row < rows; ++row)
        for (long at = whole; at < width; ++at) read(row, at, to[at * rows + row]);
}

// Scales of quantised weights, by their type.
enum ScaleType { FLOAT32, FLOAT16, BFLOAT16 };

inline Floats read_scales(const void *scales, long type, long at) {
    if (type == FLOAT32) return load(static_cast<const float *>(scales) + at);
    const Ints bits = widened(static_cast<const uint16_t *>(scales) + at);
    if (type == BFLOAT16) return as_floats(bits << 16);
    const Floats size = as_floats((bits & 0x7fff) << 13) * 0x1p112f; // also right for subnormal numbers
    return as_floats(((bits & 0x8000) << 16) | (Ints)size);
}

inline float read_scale(const void *scales, long type, long at) {
    if (type == FLOAT32) return static_cast<const float *>(scales)[at];
    uint16_t bits[LANES] = {static_cast<const uint16_t *>(scales)[at]};
    return read_scales(bits, type, 0)[0];
}

// What one thread does at a time: all rows of a group, from `row` on, with some panels of its matrix.
struct Piece {
    long group, row, first_panel, end_panel;
};

// Groups of rows, each with a matrix of its own, in pieces; groups without rows have none.
inline std::vector<Piece> in_pieces(const int64_t *counts, long groups, long outputs) {
    const long panels = (outputs + PANEL - 1) / PANEL;
    std::vector<Piece> pieces;
    for (long group = 0, row = 0; group < groups; row += counts[group++]) {
        const long parts = counts[group] ? count_pieces(panels, counts[group]) : 0;
        for (long part = 0; part < parts; ++part)
            pieces.push_back({group, row, panels * part / parts, panels * (part + 1) / parts});
    }
    return pieces;
}

} // namespace
