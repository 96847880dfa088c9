// Products of activations with weights that are both integers of 8 bits (W8A8). Sums have 32 bits and are exact.
// `integers.py` documents the arguments.
//
// A word of a panel holds the codes of four neighbouring inputs for one output. Codes of weights count from 0,
// those of activations are signed, because that is what VNNI and ARM's I8MM multiply: sums of codes minus the zeros
// of weights times the sum of a row's codes are the products. With zeros of activations, sums over columns come in.

#include "products.h"
#include "replay.h"

#include <cmath>
#include <memory>
#include <numeric>

// GCC 11 came with an assembler that knows both encodings of products of bytes (x86), GCC 10 with one for ARM's.
#if (defined(__AVX2__) && __GNUC__ >= 11) || (defined(__aarch64__) && __GNUC__ >= 10)
#define HAS_BYTE_DOTS 1
#endif

namespace {

constexpr long WORD = 4;              // inputs in a word
constexpr long AHEAD = 32;            // words of a panel between what is prefetched and what is used
constexpr float LOWEST = -128, HIGHEST = 127, SPAN = 255;

// How words are multiplied. STEP is how many words of x belong to one of weights; `lay_out` makes them of codes,
// `add` adds the products of ROWS rows, x_row apart, whose words are x_next apart, with PANEL words, whose codes it may
// take to be LOWER.

// By instructions that add four products of bytes to a sum: x86 has two encodings, ARM two kinds. Those of the SECOND
// kind multiply signed bytes only, so codes of weights count from -128 there.
template <bool SECOND> struct Dots {
    static constexpr long STEP = 1;
#if defined(__aarch64__)
    static constexpr int32_t LOWER = SECOND ? 128 : 0;
#else
    static constexpr int32_t LOWER = 0;
#endif
    static inline void lay_out(const int8_t *codes, long words, int32_t *to) {
        std::memcpy(to, codes, words * WORD);
    }
    template <int ROWS>
    static inline void add([[maybe_unused]] const int32_t *x, [[maybe_unused]] long x_row, long,
                           [[maybe_unused]] const Ints *words, [[maybe_unused]] Ints (*sums)[PANEL_VECTORS]) {
#if defined(HAS_BYTE_DOTS)
        Ints lowered[PANEL_VECTORS];
        if constexpr (LOWER != 0)
            for (int part = 0; part < PANEL_VECTORS; ++part)
                lowered[part] = words[part] ^ static_cast<int32_t>(0x80808080u);
        const Ints *const weights = LOWER != 0 ? lowered : words;
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Ints four = Ints{} + x[row * x_row];
#pragma GCC unroll 2
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                Ints result = sums[row][part];
                // by its name, since this build serves processors without it, too
#if defined(__aarch64__)
                if constexpr (SECOND)
                    asm(NEWER "sdot %0.4s, %1.16b, %2.16b" : "+w"(result) : "w"(weights[part]), "w"(four));
                else
                    asm(NEWER "usdot %0.4s, %1.16b, %2.16b" : "+w"(result) : "w"(weights[part]), "w"(four));
#else
                if constexpr (SECOND)
                    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(result) : "x"(weights[part]), "x"(four));
                else
                    asm("%{evex%} vpdpbusd %2, %1, %0" : "+v"(result) : "v"(weights[part]), "v"(four));
#endif
                sums[row][part] = result;
            }
        }
#endif
    }
};

#if defined(__AVX2__)
// By products of integers of 16 bits, in pairs: bytes 0 and 2 of a word, then bytes 1 and 3.
struct Pairs {
    static constexpr long STEP = 2;
    static constexpr int32_t LOWER = 0;
    static inline void lay_out(const int8_t *codes, long words, int32_t *to) {
        for (long word = 0; word < words; ++word, codes += WORD)
            for (int odd = 0; odd < 2; ++odd)
                *to++ = static_cast<uint16_t>(codes[odd]) | static_cast<uint32_t>(codes[odd + 2]) << 16;
    }
    static inline Ints dot(const Ints &first, const Ints &second) {
#if defined(__AVX512F__)
        return (Ints)_mm512_madd_epi16((__m512i)first, (__m512i)second);
#else
        return (Ints)_mm256_madd_epi16((__m256i)first, (__m256i)second);
#endif
    }
    template <int ROWS>
    static inline void add(const int32_t *x, long x_row, long x_next, const Ints *words,
                           Ints (*sums)[PANEL_VECTORS]) {
#pragma GCC unroll 2
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            const Ints even = words[part] & 0x00ff00ff, odd = (words[part] >> 8) & 0x00ff00ff;
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row)
                sums[row][part] +=
                    dot(even, Ints{} + x[row * x_row]) + dot(odd, Ints{} + x[row * x_row + x_next]);
        }
    }
};
typedef Pairs Wider;
#else
// One input of a word after the other.
struct Singles {
    static constexpr long STEP = WORD;
    static constexpr int32_t LOWER = 0;
    static inline void lay_out(const int8_t *codes, long words, int32_t *to) {
        for (long at = 0; at < words * WORD; ++at) to[at] = codes[at];
    }
    template <int ROWS>
    static inline void add(const int32_t *x, long x_row, long x_next, const Ints *words,
                           Ints (*sums)[PANEL_VECTORS]) {
        for (int at = 0; at < WORD; ++at)
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                const Ints codes = (words[part] >> 8 * at) & 255;
                for (int row = 0; row < ROWS; ++row) sums[row][part] += codes * x[row * x_row + at * x_next];
            }
    }
};
typedef Singles Wider;
#endif

// How far the values of a row go below and above zero; not a number if one of them is not.
struct Range {
    float below, above;
};

Range range_of(const float *x, long inputs) {
    Floats low{}, high{}, spoilt{};
    long at = 0;
    for (; at + LANES <= inputs; at += LANES) {
        const Floats values = load(x + at);
        low = values < low ? values : low;
        high = values > high ? values : high;
        spoilt += values * 0.f;
    }
    float lowest = 0, highest = 0, rest = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        lowest = std::min(lowest, low[lane]);
        highest = std::max(highest, high[lane]);
        rest += spoilt[lane];
    }
    for (; at < inputs; ++at) {
        lowest = std::min(lowest, x[at]);
        highest = std::max(highest, x[at]);
        rest += x[at] * 0.f;
    }
    return {rest - lowest, rest + highest};
}

// What the codes of a row stand for: (code - zero) * scale. `Activations` in quantised/activations.py has the same
// rules.
struct Row {
    float scale, zero, lowest;
    int32_t sum; // of all codes
};

Row row_of(const Range &range, bool has_zero) {
    constexpr float SMALLEST = 0x1p-23f;
    const float span = has_zero ? range.above + range.below : std::max(range.above, range.below);
    float scale = span / (has_zero ? SPAN : SPAN / 2);
    if (range.above + range.below != range.above + range.below) scale = range.above + range.below;
    if (scale == 0) scale = SMALLEST;
    const float zero = LOWEST + range.below / scale;
    if (!has_zero) return {scale, 0, -HIGHEST, 0};
    return {scale, std::nearbyint(std::min(std::max(zero, LOWEST), HIGHEST)), LOWEST, 0};
}

// The codes of a row, and their sum. `codes` has room for whole vectors, and is padded with zeros.
void round_row(const float *x, long inputs, Row &row, int8_t *codes) {
    Ints sums{};
    const Floats scale = all(row.scale), zero = all(row.zero), lowest = all(row.lowest);
    for (long at = 0; at < inputs; at += LANES) {
        Floats values{};
        if (at + LANES <= inputs)
            values = load(x + at);
        else
            std::memcpy(&values, x + at, (inputs - at) * sizeof(float));
        values = values / scale + zero;
        values = values < lowest ? lowest : values;
        values = values > HIGHEST ? all(HIGHEST) : values;
        Ints found = nearest(values);
        if (at + LANES > inputs)
            for (long lane = inputs - at; lane < LANES; ++lane) found[lane] = 0;
        sums += found;
        narrow(found, reinterpret_cast<uint8_t *>(codes + at));
    }
    row.sum = 0;
    for (int lane = 0; lane < LANES; ++lane) row.sum += sums[lane];
}

// A matrix, as `integers.py` lays out its addresses.
struct Matrix {
    const int32_t *codes;
    const float *scales;
    const uint8_t *zeros; // null: 128
    const int32_t *sums;  // of the weights of an output, without its scale; null if activations have no zeros
    const float *bias;    // or null
    const float *steps;   // the scale and the zero of all rows; null: each has its own
};

// Panels that one row passes at once: memory is read faster in several places at a time, and the processor then
// fetches ahead by itself (measured with AVX2 and AVX-512).
constexpr int AT_ONCE = LANES >= 8 ? 4 : 1;

// BESIDE: the first words of all rows lie beside each other, then the second ones, and so on.
template <typename Kind, bool BESIDE = false> struct Product {
    // ROWS rows of x times one panel.
    template <int ROWS>
    static void multiply(const int32_t *x, const Row *rows, const Matrix &matrix, long words, long panel,
                         Ahead ahead, float *output, long output_row, long width) {
        const long x_row = BESIDE ? 1 : words * Kind::STEP, step = BESIDE ? ROWS : 1;
        const int32_t *codes = matrix.codes + panel * words * PANEL;
        Ints found[ROWS][PANEL_VECTORS] = {};
        if constexpr (Kind::LOWER != 0)
            for (int row = 0; row < ROWS; ++row)
                for (int part = 0; part < PANEL_VECTORS; ++part) found[row][part] += Kind::LOWER * rows[row].sum;
        for (long at = 0; at < words; ++at, codes += PANEL, ahead.at += ahead.step, x += Kind::STEP * step) {
            Ints loaded[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                loaded[part] = load_words(codes + part * LANES);
                __builtin_prefetch(ahead.at + part * sizeof(Ints), 0, 2);
            }
            Kind::template add<ROWS>(x, x_row, step, loaded, found);
        }
        for (int row = 0; row < ROWS; ++row)
            write(found[row], rows[row], matrix, panel, output + row * output_row, width);
    }

    // One row of x times AT_ONCE panels, each with the results of `multiply`; `width` is that of the last one.
    static void multiply_row(const int32_t *x, const Row &row, const Matrix &matrix, long words, long panel,
                             float *output, long width) {
        const long size = words * PANEL;
        const int32_t *codes = matrix.codes + panel * size;
        Ints found[AT_ONCE][PANEL_VECTORS] = {};
        for (int next = 0; next < AT_ONCE; ++next)
            for (int part = 0; part < PANEL_VECTORS; ++part) found[next][part] += Kind::LOWER * row.sum;
        for (long at = 0; at < words; ++at, codes += PANEL, x += Kind::STEP)
#pragma GCC unroll 6
            for (int next = 0; next < AT_ONCE; ++next) {
                Ints loaded[PANEL_VECTORS];
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    loaded[part] = load_words(codes + next * size + part * LANES);
                Kind::template add<1>(x, 0, 1, loaded, &found[next]);
            }
        for (int next = 0; next < AT_ONCE; ++next)
            write(found[next], row, matrix, panel + next, output + next * PANEL, next + 1 < AT_ONCE ? PANEL : width);
    }

    // The results of a row with a panel, from its sums.
    static inline void write(const Ints *found, const Row &row, const Matrix &matrix, long panel, float *output,
                             long width) {
        constexpr int32_t MIDDLE = 128;
        const float *const scales = matrix.scales + panel * PANEL;
        const float *const bias = matrix.bias ? matrix.bias + panel * PANEL : nullptr;
        const uint8_t *const zeros = matrix.zeros ? matrix.zeros + panel * PANEL : nullptr;
        const int32_t *const columns = matrix.sums ? matrix.sums + panel * PANEL : nullptr;
        // In double precision all of this is exact but for the last step.
        const double scale = row.scale, zero = row.zero, sum = row.sum;
        int32_t sums[PANEL];
        float values[PANEL];
        std::memcpy(sums, found, sizeof sums);
        for (int at = 0; at < PANEL; ++at) {
            double exact = sums[at] - (zeros ? zeros[at] : MIDDLE) * sum;
            if (columns) exact -= zero * columns[at];
            values[at] = static_cast<float>(exact * (scale * scales[at]) + (bias ? bias[at] : 0.f));
        }
        std::memcpy(output, values, width * sizeof(float));
    }
};

// Rows that are many lie beside each other: far apart, they compete for the same lines of the L1 cache. Of few rows,
// threads would write to the same lines.
inline bool beside(long rows) { return rows > PRODUCT_ROWS; }

// All rows of x times some of the panels of one matrix.
template <typename Kind>
void multiply_panels(const int32_t *x, const Row *rows, long count, const Matrix &matrix, long words,
                     long outputs, long first_panel, long end_panel, float *output) {
    const long x_row = words * Kind::STEP, block = block_of(x_row * sizeof *x);
    const auto &by_rows = beside(count) ? multiplies<Product<Kind, true>>.by_rows : multiplies<Product<Kind>>.by_rows;
    for (; count == 1 && AT_ONCE > 1 && first_panel + AT_ONCE <= end_panel; first_panel += AT_ONCE)
        Product<Kind>::multiply_row(x, rows[0], matrix, words, first_panel, output + first_panel * PANEL,
                                    std::min<long>(PANEL, outputs - (first_panel + AT_ONCE - 1) * PANEL));
    for (long first = 0; first < count; first += block)
        for_panels(std::min(block, count - first), matrix.codes, words * PANEL, AHEAD * PANEL, first_panel, end_panel,
                   [&](long panel, long from, long to, const Ahead &ahead) {
                       const long row = first + from, width = std::min<long>(PANEL, outputs - panel * PANEL);
                       by_rows[to - from](x + row * x_row, rows + row, matrix, words, panel, ahead,
                                          output + row * outputs + panel * PANEL, outputs, width);
                   });
}

template <typename Kind>
void multiply_all(const float *x, const int64_t *counts, long groups, long inputs, const float *ranges,
                  const Matrix *matrices, long outputs, float *output) {
    const long words = (inputs + WORD - 1) / WORD, x_row = words * Kind::STEP;
    const long count = std::accumulate(counts, counts + groups, 0L);
    const std::unique_ptr<int32_t[]> laid_out(new int32_t[count * x_row]);
    std::vector<Row> rows(count);
    std::vector<std::pair<long, long>> origins; // each row's group, and its number there
    for (long group = 0; group < groups; ++group)
        for (long at = 0; at < counts[group]; ++at) origins.emplace_back(group, at);
    const std::vector<Piece> pieces = in_pieces(counts, groups, outputs);
#pragma omp parallel
    {
        std::vector<int8_t> codes(words * WORD + LANES);
        std::vector<int32_t> own_words(x_row);
#pragma omp for
        for (long row = 0; row < count; ++row) {
            const auto [group, at] = origins[row];
            const float *const own = x + row * inputs, *const steps = matrices[group].steps;
            if (steps)
                rows[row] = {steps[0], steps[1], LOWEST, 0};
            else
                rows[row] = row_of(ranges ? Range{ranges[2 * row], ranges[2 * row + 1]} : range_of(own, inputs),
                                   matrices[group].sums != nullptr);
            round_row(own, inputs, rows[row], codes.data());
            if (!beside(counts[group])) {
                Kind::lay_out(codes.data(), words, laid_out.get() + row * x_row);
                continue;
            }
            Kind::lay_out(codes.data(), words, own_words.data());
            const Place place(at, counts[group], block_of(x_row * sizeof(int32_t)));
            int32_t *const to = laid_out.get() + (row - at + place.first) * x_row + place.at;
            for (long word = 0; word < x_row; ++word) to[word * place.rows] = own_words[word];
        }
#pragma omp for schedule(dynamic, 1)
        for (long at = 0; at < static_cast<long>(pieces.size()); ++at) {
            const Piece &piece = pieces[at];
            multiply_panels<Kind>(laid_out.get() + piece.row * x_row, rows.data() + piece.row, counts[piece.group],
                                  matrices[piece.group], words, outputs, piece.first_panel, piece.end_panel,
                                  output + piece.row * outputs);
        }
    }
}

} // namespace

extern "C" {

// 0: this processor has no instructions for products of bytes; 1: it has those of AVX-512, or of I8MM; 2: those of
// AVX, or of ARM's DotProd.
int multiplies_bytes() {
#if defined(HAS_BYTE_DOTS) && defined(__aarch64__)
    return has_i8mm() ? 1 : has_dotprod() ? 2 : 0;
#elif defined(HAS_BYTE_DOTS)
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")) return 1;
#if !defined(__AVX512F__)
    if (__builtin_cpu_supports("avxvnni")) return 2;
#endif
#endif
    return 0;
}

void find_ranges(const float *x, long rows, long inputs, float *ranges) {
#pragma omp parallel for
    for (long row = 0; row < rows; ++row) {
        const Range found = range_of(x + row * inputs, inputs);
        ranges[2 * row] = found.below, ranges[2 * row + 1] = found.above;
    }
}

void multiply_integers(const float *x, const int64_t *counts, long groups, long inputs, long kind,
                       const float *ranges, const void *matrices, long outputs, float *output) {
#if defined(__AVX512F__)
    const auto by_dots = multiply_all<Dots<false>>;
#else
    const auto by_dots = kind == 2 ? multiply_all<Dots<true>> : multiply_all<Dots<false>>;
#endif
    (kind ? by_dots : multiply_all<Wider>)(x, counts, groups, inputs, ranges, static_cast<const Matrix *>(matrices),
                                           outputs, output);
}
}

REPEATS(multiply_integers);
REPEATS(find_ranges);
