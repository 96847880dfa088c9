// Products with weights in panels, in float32, bfloat16 and mxfp4, as fast as memory allows for few rows.
// `products.py` documents the arguments. All arrays are row-major; sizes are counts of values.

#include "products.h"
#include "replay.h"

// GCC 10 came with an assembler that knows products of pairs.
#if (defined(__AVX512F__) || defined(__aarch64__)) && __GNUC__ >= 10
#define HAS_DOTS 1
#endif

namespace {

constexpr long AHEAD = LANES == 16 ? 64 : 256; // words of a panel between what is prefetched and what is used
constexpr long BLOCK_VALUES = 1 << 17; // of x, which stays in the L2 cache while all panels pass

// How words of 32 bits, of which a panel has [words, PANEL], are multiplied. Value is the type of x and of the
// results, Input that of x as `add` reads it, STEP how many of these belong to a word, FEW how many rows gain by
// several panels at once; `add` adds the products of ROWS rows, x_row apart, with PANEL words.

// A word is a float.
struct Singles {
    typedef float Value;
    typedef float Input;
    static constexpr long INPUTS = 1, STEP = 1, FEW = 3;
    template <int ROWS>
    static inline void add(const float *x, long x_row, const Floats *words, Floats (*sums)[PANEL_VECTORS]) {
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part) sums[row][part] += x[row * x_row] * words[part];
    }
};

// A word is two weights of 16 bits for neighbouring inputs, the first one in its lower half. They become floats.
template <typename Of, typename Weight> struct Halves {
    typedef Of Value;
    typedef float Input;
    static constexpr long INPUTS = 2, STEP = 2, FEW = 2;
    template <int ROWS>
    static inline void add(const float *x, long x_row, const Floats *words, Floats (*sums)[PANEL_VECTORS]) {
        for (int half = 0; half < 2; ++half) {
            Floats weights[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; ++part)
                weights[part] = Weight::widened(as_bits(words[part]), half);
            for (int row = 0; row < ROWS; ++row)
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    sums[row][part] += x[row * x_row + half] * weights[part];
        }
    }
};

struct InBfloat16 {
    static inline Floats widened(const Ints &words, int half) {
        return as_floats(half ? words & static_cast<int32_t>(0xffff0000u) : words << 16);
    }
};

struct InFloat16 {
    static inline Floats widened(const Ints &words, int half) { return from_float16(half ? words >> 16 : words); }
};

// Both in bfloat16, by instructions that multiply two pairs and add both products to a float; numbers below the normal
// ones count as zero.
struct Dots {
    typedef Bfloat16 Value;
    typedef int32_t Input;
    static constexpr long INPUTS = 2, STEP = 1, FEW = 1;
    template <int ROWS>
    static inline void add([[maybe_unused]] const int32_t *x, [[maybe_unused]] long x_row,
                           [[maybe_unused]] const Floats *words, [[maybe_unused]] Floats (*sums)[PANEL_VECTORS]) {
#if defined(HAS_DOTS)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Ints pair = Ints{} + x[row * x_row];
#pragma GCC unroll 2
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                Floats result = sums[row][part];
                // by its name, since this build serves processors without it, too
#if defined(__aarch64__)
                asm(NEWER "bfdot %0.4s, %1.8h, %2.8h" : "+w"(result) : "w"(words[part]), "w"(pair));
#else
                asm("vdpbf16ps %2, %1, %0" : "+v"(result) : "v"(words[part]), "v"(pair));
#endif
                sums[row][part] = result;
            }
        }
#endif
    }
};

// Panels that so many rows pass at once, as far as there are registers for the sums. Memory is read faster in several
// places at a time; processors then fetch ahead by themselves, and lose time if they are told to. Measured with AVX2.
template <typename Kind> constexpr int at_once(long rows) { return LANES == 8 && rows <= Kind::FEW ? 6 / rows : 1; }

template <typename Kind> struct Product {
    // ROWS rows of x times one panel; `ahead` is prefetched meanwhile. Every row is summed in the same order
    // whatever ROWS is, so a token's result does not depend on its batch.
    template <int ROWS>
    static void multiply(const typename Kind::Input *x, long words, const float *panel, const float *bias,
                         Ahead ahead, typename Kind::Value *output, long output_row, long width) {
        const long x_row = words * Kind::STEP;
        Floats result[ROWS][PANEL_VECTORS];
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part)
                result[row][part] = bias ? load(bias + part * LANES) : Floats{};
        for (long at = 0; at < words; ++at, panel += PANEL, ahead.at += ahead.step, x += Kind::STEP) {
            Floats weights[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                weights[part] = load(panel + part * LANES);
                __builtin_prefetch(ahead.at + part * sizeof(Floats), 0, 2);
            }
            Kind::template add<ROWS>(x, x_row, weights, result);
        }
        write<ROWS>(result, output, output_row, width);
    }

    template <int ROWS>
    static inline void write(const Floats (*result)[PANEL_VECTORS], typename Kind::Value *output, long output_row,
                             long width) {
        for (int row = 0; row < ROWS; ++row) {
            typename Kind::Value values[PANEL];
            for (int part = 0; part < PANEL_VECTORS; ++part) store(values + part * LANES, result[row][part]);
            std::memcpy(output + row * output_row, values, width * sizeof values[0]);
        }
    }
};

// The same, in the same order, with as many panels as so few rows pass at once; `width` is that of the last one.
template <typename Kind> struct Several {
    template <int ROWS>
    static void multiply(const typename Kind::Input *x, long words, const float *panel, const float *bias,
                         typename Kind::Value *output, long output_row, long width) {
        constexpr int COUNT = at_once<Kind>(ROWS);
        const long x_row = words * Kind::STEP, size = words * PANEL;
        Floats result[COUNT][ROWS][PANEL_VECTORS];
        for (int next = 0; next < COUNT; ++next)
            for (int row = 0; row < ROWS; ++row)
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    result[next][row][part] = bias ? load(bias + next * PANEL + part * LANES) : Floats{};
        for (long at = 0; at < words; ++at, panel += PANEL, x += Kind::STEP)
#pragma GCC unroll 6
            for (int next = 0; next < COUNT; ++next) {
                Floats weights[PANEL_VECTORS];
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    weights[part] = load(panel + next * size + part * LANES);
                Kind::template add<ROWS>(x, x_row, weights, result[next]);
            }
        for (int next = 0; next < COUNT; ++next)
            Product<Kind>::template write<ROWS>(result[next], output + next * PANEL, output_row,
                                                next + 1 < COUNT ? PANEL : width);
    }
};

// All rows of x times some of the panels; rows of the output are `output_row` apart.
template <typename Kind>
void multiply_panels(const typename Kind::Value *x, long rows, long inputs, const float *packed,
                     const float *bias, long outputs, long first_panel, long end_panel,
                     typename Kind::Value *output, long output_row) {
    typedef typename Kind::Input Input;
    constexpr bool CONVERTS = sizeof(Input) * Kind::STEP > sizeof(*x) * Kind::INPUTS;
    const long words = inputs / Kind::INPUTS, x_row = words * Kind::STEP, size = words * PANEL;
    const long block = std::max(1L, BLOCK_VALUES / std::max(1L, x_row) / PRODUCT_ROWS) * PRODUCT_ROWS;
    std::vector<float> converted(CONVERTS ? std::min(block, rows) * inputs : 0);
    for (long first = 0; first < rows; first += block) {
        const long count = std::min(block, rows - first);
        const Input *some = reinterpret_cast<const Input *>(x + first * inputs);
        if constexpr (CONVERTS) {
            convert(x + first * inputs, count * inputs, converted.data());
            some = converted.data();
        }
        const auto width_of = [&](long panel) { return std::min<long>(PANEL, outputs - panel * PANEL); };
        long panel = first_panel;
        if (const long several = at_once<Kind>(count); several > 1)
            for (; panel + several <= end_panel; panel += several)
                multiplies<Several<Kind>, Kind::FEW>.by_rows[count](
                    some, words, packed + panel * size, bias ? bias + panel * PANEL : nullptr,
                    output + first * output_row + panel * PANEL, output_row, width_of(panel + several - 1));
        for_panels(count, packed, size, AHEAD * PANEL, panel, end_panel,
                   [&](long panel, long from, long to, const Ahead &ahead) {
                       multiplies<Product<Kind>>.by_rows[to - from](
                           some + from * x_row, words, packed + panel * size, bias ? bias + panel * PANEL : nullptr,
                           ahead, output + (first + from) * output_row + panel * PANEL, output_row,
                           width_of(panel));
                   });
    }
}

// Calls run(kind) with the kind of a number in `products.py`.
template <typename Run> inline void with_kind(long kind, Run run) {
    switch (kind) {
    case 1: return run(Halves<Bfloat16, InBfloat16>{});
    case 2: return run(Dots{});
    case 3: return run(Halves<float, InBfloat16>{});
    case 4: return run(Halves<float, InFloat16>{});
    default: return run(Singles{});
    }
}

// Weights in mxfp4 (`mxfp4.py`): a word holds the codes of WORD inputs for one output.
constexpr int MX_BLOCK = 32, MX_ROWS = PRODUCT_ROWS / 2, WORD = 8;

// The values of codes in the lowest bits: a sign, two bits of exponent and one of mantissa.
inline Floats value_of(const Ints &codes) {
#if defined(__AVX__)
    const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
#endif
#if defined(__AVX512F__)
    return __builtin_shuffle(load(values), codes);
#elif defined(__AVX__)
    const Floats found = __builtin_shuffle(load(values), codes & 7);
    return as_floats(as_bits(found) | (codes & 8) << 28);
#else
    // Exponents are 1 from zero instead of 127. The sign fills the bits above them, and all but one are cleared.
    const Ints bits = (codes << 28) >> 6 & static_cast<int32_t>(0x81c00000u);
    return as_floats(bits) * 0x1p126f;
#endif
}

struct MxProduct {
    // ROWS rows of x times one panel of codes [inputs / WORD, PANEL] with exponents [inputs / MX_BLOCK, PANEL].
    template <int ROWS>
    static void multiply(const float *x, long inputs, const int32_t *codes, const uint8_t *exponents,
                         const float *bias, float *output, long output_row, long width) {
        Floats result[ROWS][PANEL_VECTORS];
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part)
                result[row][part] = bias ? load(bias + part * LANES) : Floats{};
        for (long first = 0; first < inputs; first += MX_BLOCK, exponents += PANEL) {
            Floats sums[ROWS][PANEL_VECTORS] = {};
            for (long from = first; from < first + MX_BLOCK; from += WORD, codes += PANEL)
                for (int part = 0; part < PANEL_VECTORS; ++part) {
                    Ints words = load_words(codes + part * LANES);
                    for (long at = from; at < from + WORD; ++at, words >>= 4) {
                        const Floats weights = value_of(words);
                        for (int row = 0; row < ROWS; ++row) sums[row][part] += x[row * inputs + at] * weights;
                    }
                }
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                const Floats scale = as_floats(widened(exponents + part * LANES) << 23);
                for (int row = 0; row < ROWS; ++row) result[row][part] += sums[row][part] * scale;
            }
        }
        for (int row = 0; row < ROWS; ++row)
            std::memcpy(output + row * output_row, result[row], width * sizeof(float));
    }
};

// Calls multiply(group, first row, first panel, end panel) for all groups that have rows, in parallel.
template <typename Run>
void for_groups(const int64_t *counts, long groups, long outputs, Run multiply) {
    const std::vector<Piece> pieces = in_pieces(counts, groups, outputs);
#pragma omp parallel for schedule(dynamic, 1)
    for (long at = 0; at < static_cast<long>(pieces.size()); ++at)
        multiply(pieces[at].group, pieces[at].row, pieces[at].first_panel, pieces[at].end_panel);
}

} // namespace

extern "C" {

long panel_width() { return PANEL; }

int multiplies_pairs() {
#if defined(HAS_DOTS) && defined(__aarch64__)
    return has_bf16();
#elif defined(HAS_DOTS)
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

int has_tiles() {
#if defined(HAS_DOTS) && defined(__AVX512F__)
    return __builtin_cpu_supports("amx-bf16") != 0;
#else
    return 0;
#endif
}

void multiply_packed(const void *x, long rows, long inputs, long kind, const float *packed, const float *bias,
                     long outputs, void *output) {
    const long panels = (outputs + PANEL - 1) / PANEL;
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        const long pieces = count_pieces(panels, rows);
#pragma omp parallel for schedule(dynamic, 1)
        for (long piece = 0; piece < pieces; ++piece)
            multiply_panels<Kind>(static_cast<const Value *>(x), rows, inputs, packed, bias, outputs,
                                  panels * piece / pieces, panels * (piece + 1) / pieces,
                                  static_cast<Value *>(output), outputs);
    });
}

void multiply_heads(const void *x, long x_row, long x_head, long rows, long heads, long inputs, long kind,
                    const float *packed, long outputs, void *output, long output_row, long output_head) {
    const long panels = (outputs + PANEL - 1) / PANEL;
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        const long pieces = count_pieces(panels, rows), size = panels * (inputs / Kind::INPUTS) * PANEL;
        const bool apart = rows > 1 && x_row != inputs;
#pragma omp parallel
        {
            std::vector<Value> together(apart ? rows * inputs : 0);
#pragma omp for schedule(dynamic, 1)
            for (long item = 0; item < heads * pieces; ++item) {
                const long head = item / pieces, piece = item % pieces;
                const Value *own = static_cast<const Value *>(x) + head * x_head;
                if (apart) {
                    for (long row = 0; row < rows; ++row)
                        std::memcpy(&together[row * inputs], own + row * x_row, inputs * sizeof(Value));
                    own = together.data();
                }
                multiply_panels<Kind>(own, rows, inputs, packed + head * size, nullptr, outputs,
                                      panels * piece / pieces, panels * (piece + 1) / pieces,
                                      static_cast<Value *>(output) + head * output_head, output_row);
            }
        }
    });
}

void multiply_grouped(const void *x, const int64_t *counts, long groups, long inputs, long kind,
                      const float *const *packed, const float *const *biases, long outputs, void *output) {
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        for_groups(counts, groups, outputs, [&](long group, long row, long first, long end) {
            multiply_panels<Kind>(static_cast<const Value *>(x) + row * inputs, counts[group], inputs,
                                  packed[group], biases ? biases[group] : nullptr, outputs, first, end,
                                  static_cast<Value *>(output) + row * outputs, outputs);
        });
    });
}

void multiply_mxfp4(const float *x, const int64_t *counts, long groups, long inputs,
                    const int32_t *const *codes, const uint8_t *const *exponents, const float *const *biases,
                    long outputs, float *output) {
    for_groups(counts, groups, outputs, [&](long group, long row, long first_panel, long end_panel) {
        for (long panel = first_panel; panel < end_panel; ++panel) {
            const int32_t *const own = codes[group] + panel * inputs / WORD * PANEL;
            const uint8_t *const scales = exponents[group] + panel * inputs / MX_BLOCK * PANEL;
            const float *const added = biases ? biases[group] + panel * PANEL : nullptr;
            const long width = std::min<long>(PANEL, outputs - panel * PANEL);
            for (long first = 0; first < counts[group]; first += MX_ROWS) {
                const long from = row + first, count = std::min<long>(MX_ROWS, counts[group] - first);
                multiplies<MxProduct, MX_ROWS>.by_rows[count](x + from * inputs, inputs, own, scales, added,
                                                              output + from * outputs + panel * PANEL,
                                                              outputs, width);
            }
        }
    });
}
}

REPEATS(multiply_packed);
REPEATS(multiply_heads);
REPEATS(multiply_grouped);
REPEATS(multiply_mxfp4);
