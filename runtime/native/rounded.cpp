// Products of float32 activations with weights that are integers of 4 or 8 bits, with a scale and perhaps a zero for
// each group of inputs. `rounded.py` documents the arguments.
//
// Each run of inputs of a row is rounded to integers of 16 bits with a scale of its own. Products of integers are
// summed exactly, and a processor multiplies twice as many pairs of 16 bits as floats at a time.

#include "products.h"
#include "replay.h"

#include <memory>

// GCC 11 came with an assembler that knows them.
#if defined(__AVX512F__) && __GNUC__ >= 11
#define HAS_WORD_DOTS 1
#endif

namespace {

constexpr float LARGEST = 32767, SMALLEST = 1e-30f;
constexpr long AHEAD = LANES == 16 ? 16 : 64; // words of a panel between what is prefetched and what is used

struct Weights {
    const int32_t *codes;
    const void *scales;
    const uint8_t *zeros; // or null
    const int32_t *runs;  // [count, 3]: first input, end, group
    const float *bias;    // or null
    long inputs, groups, count, scale_type, scale_width;
};

#if defined(__AVX2__)

// How a word of a panel holds the codes of neighbouring inputs for one output. `pair` is the first two that are left,
// in 16 bits each, and `next` a word without them. Zeros of a group are codes, too: BYTES for all outputs of a panel.
// AT_ONCE panels are passed by one row at once: memory is read faster in several places at a time, and the processor
// then fetches ahead by itself (measured with AVX2 and AVX-512). MOST_ROWS are multiplied together. Nibbles need
// registers of their own.

struct Nibbles {
    static constexpr long PAIRS = 4;
    static constexpr int AT_ONCE = LANES == 16 ? 4 : 1, MOST_ROWS = FEWER_ROWS;
    static constexpr int32_t MIDDLE = 8;
    static inline Ints pair(const Ints &word) { return word & 0x000f000f; }
    static inline Ints next(const Ints &word) { return word >> 4; }
    static constexpr long BYTES = PANEL / 2; // the lower four bits for the first half of the panel
    static inline Ints zeros(const uint8_t *from, int part) {
        static_assert(PANEL_VECTORS == 2, "a byte has a code for each of two vectors");
        return part ? widened(from) >> 4 : widened(from) & 15;
    }
};

struct SignedBytes {
    static constexpr long PAIRS = 2;
    static constexpr int AT_ONCE = LANES == 16 ? 4 : 3, MOST_ROWS = PRODUCT_ROWS;
    static constexpr int32_t MIDDLE = 0;
    static inline Ints pair(const Ints &word) {
#if defined(__AVX512F__)
        return (Ints)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)word, 8), 8);
#else
        return (Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)word, 8), 8);
#endif
    }
    static inline Ints next(const Ints &word) { return word >> 8; }
    static constexpr long BYTES = PANEL;
    static inline Ints zeros(const uint8_t *from, int part) {
        return widened(reinterpret_cast<const int8_t *>(from) + part * LANES);
    }
};

// A sum and the products of two pairs: by an instruction (VNNI), or by two.
inline Ints with_product(Ints sum, const Ints &weights, const Ints &x) {
#if defined(HAS_WORD_DOTS)
    // by its name, since this build serves processors without it, too
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
    return sum;
#elif defined(__AVX512F__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)weights, (__m512i)x);
#else
    return sum + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)x);
#endif
}

// What the codes of a row's run stand for, code * scale, and their sum.
struct Step {
    float scale;
    int32_t sum;
};

typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int16_t Codes16 __attribute__((may_alias)); // pairs of them are read as words

// The codes of a run of a row.
Step round_run(const float *x, long count, Codes16 *codes) {
    Floats highest{}, spoilt{};
    const auto look = [&](const Floats &values) {
        const Floats sizes = values < 0.f ? -values : values;
        highest = sizes > highest ? sizes : highest;
        spoilt += values * 0.f;
    };
    const auto rest_of = [&](long at) {
        Floats values{};
        std::memcpy(&values, x + at, (count - at) * sizeof(float));
        return values;
    };
    const long whole = count / LANES * LANES;
    for (long at = 0; at < whole; at += LANES) look(load(x + at));
    if (whole < count) look(rest_of(whole));
    float largest = 0, rest = 0;
    for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, highest[lane]), rest += spoilt[lane];
    const float inverse = largest > SMALLEST ? LARGEST / largest : 0.f;
    if (rest != rest) {
        std::fill(codes, codes + count, static_cast<int16_t>(0));
        return {rest, 0}; // what is not a number makes all results none
    }
    Ints sums{};
    for (long at = 0; at < count; at += LANES) {
        const Ints found = nearest((at < whole ? load(x + at) : rest_of(at)) * inverse);
        sums += found;
        const auto shorts = __builtin_convertvector(found, Shorts);
        std::memcpy(codes + at, &shorts, std::min<long>(LANES, count - at) * sizeof(int16_t));
    }
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return {largest / LARGEST, sum};
}

// A group of the inputs of a panel's outputs.
struct Group {
    long at;

    Group(const Weights &weights, long panel, long run) : at(panel * weights.groups + weights.runs[3 * run + 2]) {}

    Floats scale(const Weights &weights, int part) const {
        return weights.scale_width == 1 ? all(read_scale(weights.scales, weights.scale_type, at))
                                        : read_scales(weights.scales, weights.scale_type, at * PANEL + part * LANES);
    }
    template <typename Codes> Ints zero(const Weights &weights, int part) const {
        return weights.zeros ? Codes::zeros(weights.zeros + at * Codes::BYTES, part) : Ints{} + Codes::MIDDLE;
    }
};

inline void add_run(float *total, const Ints &sum, const Floats &scale, const Ints &zero, const Step &step) {
    store(total, load(total) + __builtin_convertvector(sum - zero * step.sum, Floats) * (scale * step.scale));
}

// Words of each output's codes, the last one padded.
template <typename Codes> long words_of(const Weights &weights) {
    return (weights.inputs + 2 * Codes::PAIRS - 1) / (2 * Codes::PAIRS);
}

// The codes of a row, padded with zeros, at its place. `codes` has room for them.
void round_row(const float *x, const Weights &weights, const Place &place, Step *steps, int32_t *codes,
               int32_t *laid_out, long x_row) {
    Codes16 *const singly = reinterpret_cast<Codes16 *>(codes);
    for (long run = 0; run < weights.count; ++run) {
        const int32_t first = weights.runs[3 * run], end = weights.runs[3 * run + 1];
        steps[run] = round_run(x + first, end - first, singly + first);
    }
    std::fill(singly + weights.inputs, singly + 2 * x_row, static_cast<int16_t>(0));
    int32_t *const to = laid_out + place.first * x_row + place.at;
    for (long pair = 0; pair < x_row; ++pair) to[pair * place.rows] = codes[pair];
}

template <typename Codes> struct Product {
    // Sums that do not wait for each other.
    template <int ROWS> static constexpr int CHAINS = ROWS == 1 ? Codes::PAIRS : ROWS < 4 ? 2 : 1;

    // Adds the products of the word's pairs with those of ROWS rows. Nothing is taken from the words ahead of time, or
    // there would be too few registers for all sums.
    template <int ROWS>
    static inline void add_pairs(const int32_t *x, Ints *words, Ints (*sums)[ROWS][PANEL_VECTORS]) {
#pragma GCC unroll 1
        for (int at = 0; at < Codes::PAIRS; at += CHAINS<ROWS>)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS<ROWS>; ++chain, x += ROWS) {
                Ints pairs[PANEL_VECTORS];
                for (int part = 0; part < PANEL_VECTORS; ++part) {
                    pairs[part] = Codes::pair(words[part]);
                    words[part] = Codes::next(words[part]);
                }
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row) {
                    const Ints two = Ints{} + x[row];
#pragma GCC unroll 2
                    for (int part = 0; part < PANEL_VECTORS; ++part)
                        sums[chain][row][part] = with_product(sums[chain][row][part], pairs[part], two);
                }
            }
    }

    // ROWS rows of x times one panel.
    template <int ROWS>
    static void multiply(const int32_t *x, const Step *steps, const Weights &weights, long panel,
                         Ahead ahead, float *output, long output_row, long width) {
        constexpr long WORD = 2 * Codes::PAIRS;
        float totals[ROWS][PANEL] = {};
        const int32_t *codes = weights.codes + panel * words_of<Codes>(weights) * PANEL;
        for (long run = 0; run < weights.count; ++run) {
            const long first = weights.runs[3 * run] / WORD, end = (weights.runs[3 * run + 1] + WORD - 1) / WORD;
            const int32_t *own = x + first * Codes::PAIRS * ROWS;
            Ints sums[CHAINS<ROWS>][ROWS][PANEL_VECTORS] = {};
            for (long word = first; word < end; ++word, codes += PANEL, own += Codes::PAIRS * ROWS) {
                Ints words[PANEL_VECTORS];
                for (int part = 0; part < PANEL_VECTORS; ++part) {
                    words[part] = load_words(codes + part * LANES);
                    __builtin_prefetch(ahead.at + part * sizeof(Ints), 0, 2);
                }
                ahead.at += ahead.step;
                add_pairs<ROWS>(own, words, sums);
            }
            const Group group(weights, panel, run);
#pragma GCC unroll 2
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                const Floats scale = group.scale(weights, part);
                const Ints zero = group.template zero<Codes>(weights, part);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; ++row) {
                    Ints sum = sums[0][row][part];
#pragma GCC unroll 4
                    for (int chain = 1; chain < CHAINS<ROWS>; ++chain) sum += sums[chain][row][part];
                    add_run(totals[row] + part * LANES, sum, scale, zero, steps[row * weights.count + run]);
                }
            }
        }
        for (int row = 0; row < ROWS; ++row)
            for (long at = 0; at < width; ++at)
                output[row * output_row + at] =
                    totals[row][at] + (weights.bias ? weights.bias[panel * PANEL + at] : 0.f);
    }

    // One row of x times Codes::AT_ONCE panels, each with the results of `multiply`; `width` is that of the last one.
    static void multiply_row(const int32_t *x, const Step *steps, const Weights &weights, long panel, float *output,
                             long width) {
        constexpr long WORD = 2 * Codes::PAIRS;
        constexpr int AT_ONCE = Codes::AT_ONCE;
        float totals[AT_ONCE][PANEL] = {};
        const long size = words_of<Codes>(weights) * PANEL;
        const int32_t *codes = weights.codes + panel * size;
        for (long run = 0; run < weights.count; ++run) {
            const long first = weights.runs[3 * run] / WORD, end = (weights.runs[3 * run + 1] + WORD - 1) / WORD;
            const int32_t *own = x + first * Codes::PAIRS;
            Ints sums[AT_ONCE][PANEL_VECTORS] = {};
            for (long word = first; word < end; ++word, codes += PANEL, own += Codes::PAIRS) {
                Ints words[AT_ONCE][PANEL_VECTORS];
                for (int next = 0; next < AT_ONCE; ++next)
                    for (int part = 0; part < PANEL_VECTORS; ++part)
                        words[next][part] = load_words(codes + next * size + part * LANES);
#pragma GCC unroll 4
                for (int pair = 0; pair < Codes::PAIRS; ++pair) {
                    const Ints two = Ints{} + own[pair];
#pragma GCC unroll 4
                    for (int next = 0; next < AT_ONCE; ++next)
#pragma GCC unroll 2
                        for (int part = 0; part < PANEL_VECTORS; ++part) {
                            Ints &word = words[next][part], &sum = sums[next][part];
                            sum = with_product(sum, Codes::pair(word), two);
                            word = Codes::next(word);
                        }
                }
            }
            for (int next = 0; next < AT_ONCE; ++next) {
                const Group group(weights, panel + next, run);
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    add_run(totals[next] + part * LANES, sums[next][part], group.scale(weights, part),
                            group.template zero<Codes>(weights, part), steps[run]);
            }
        }
        for (long at = 0; at < (AT_ONCE - 1) * PANEL + width; ++at)
            output[at] = totals[at / PANEL][at % PANEL] + (weights.bias ? weights.bias[panel * PANEL + at] : 0.f);
    }
};

template <typename Codes>
void multiply_all(const float *x, long rows, const Weights &weights, long outputs, float *output) {
    const long words = words_of<Codes>(weights), x_row = words * Codes::PAIRS;
    const std::unique_ptr<int32_t[]> laid_out(new int32_t[rows * x_row]);
    const std::unique_ptr<Step[]> steps(new Step[rows * weights.count]);
    const int64_t counts[] = {rows};
    const std::vector<Piece> pieces = in_pieces(counts, 1, outputs);
    constexpr long MOST = Codes::MOST_ROWS;
    const long block = block_of(x_row * sizeof(int32_t), MOST);
#pragma omp parallel
    {
        std::vector<int32_t> codes(x_row);
#pragma omp for
        for (long row = 0; row < rows; ++row)
            round_row(x + row * weights.inputs, weights, Place(row, rows, block, MOST),
                      steps.get() + row * weights.count, codes.data(), laid_out.get(), x_row);
#pragma omp for schedule(dynamic, 1)
        for (long at = 0; at < static_cast<long>(pieces.size()); ++at) {
            const long end = pieces[at].end_panel;
            long begin = pieces[at].first_panel;
            if constexpr (constexpr int AT_ONCE = Codes::AT_ONCE; AT_ONCE > 1)
                for (; rows == 1 && begin + AT_ONCE <= end; begin += AT_ONCE)
                    Product<Codes>::multiply_row(laid_out.get(), steps.get(), weights, begin, output + begin * PANEL,
                                                 std::min<long>(PANEL, outputs - (begin + AT_ONCE - 1) * PANEL));
            for (long first = 0; first < rows; first += block)
                for_panels<MOST>(std::min(block, rows - first), weights.codes, words * PANEL, AHEAD * PANEL, begin, end,
                           [&](long panel, long from, long to, const Ahead &ahead) {
                               const long row = first + from;
                               multiplies<Product<Codes>>.by_rows[to - from](
                                   laid_out.get() + row * x_row, steps.get() + row * weights.count, weights, panel,
                                   ahead, output + row * outputs + panel * PANEL, outputs,
                                   std::min<long>(PANEL, outputs - panel * PANEL));
                           });
        }
    }
}
#endif

} // namespace

extern "C" {

// Whether this processor multiplies pairs of integers of 16 bits faster than floats.
int multiplies_words() {
#if defined(HAS_WORD_DOTS)
    return __builtin_cpu_supports("avx512vnni") != 0;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

// Only where `multiplies_words`.
void multiply_rounded(const float *x, long rows, long inputs, long kind, const int32_t *codes, const void *scales,
                      long scale_type, long scale_width, const uint8_t *zeros, long groups, const int32_t *runs,
                      long count, const float *bias, long outputs, float *output) {
    const Weights weights{codes, scales, zeros, runs, bias, inputs, groups, count, scale_type, scale_width};
#if defined(__AVX2__)
    (kind == 0 ? multiply_all<Nibbles> : multiply_all<SignedBytes>)(x, rows, weights, outputs, output);
#else
    (void)x, (void)rows, (void)kind, (void)outputs, (void)output, (void)weights;
#endif
}
}

REPEATS(multiply_rounded);
