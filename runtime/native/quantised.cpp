// Products of float32 activations with quantised weights: integers of 4 and 8 bits and floats of 8 bits, with
// a scale and perhaps a zero for each group of inputs. `quantised.py` documents the arguments.
//
// For a few rows, weights turn into floats in registers on their way from memory: the time is that of reading
// the packed bytes. For more rows, a tile of weights turns into floats in the cache, and all rows pass it.
// Either way a row is summed in the same order, so a token's result does not depend on its batch.

#include "products.h"
#include "replay.h"

namespace {

inline const int8_t *as_signed(const uint8_t *codes) { return reinterpret_cast<const int8_t *>(codes); }

// How codes become floats, PANEL at a time from BYTES bytes: the values divided by UNIT, a power of two. Another format
// is another of these.
struct SignedBytes {
    static constexpr long BYTES = PANEL;
    static constexpr float UNIT = 1;
    static inline void read_panel(const uint8_t *from, Floats *to) {
        for (int part = 0; part < PANEL_VECTORS; ++part)
            to[part] = __builtin_convertvector(widened(as_signed(from) + part * LANES), Floats);
    }
};

// Two to a byte, the lower four bits for the first half of the panel; 8 stands for zero.
struct Nibbles {
    static constexpr long BYTES = PANEL / 2;
    static constexpr float UNIT = 1;
    static inline void read_panel(const uint8_t *from, Floats *to) {
        static_assert(PANEL_VECTORS == 2, "a byte has a code for each of two vectors");
        const Ints both = widened(from);
        to[0] = value(both);
        to[1] = value(both >> 4);
    }
    static inline Floats value(const Ints &codes) {
#if defined(__AVX512F__)
        const Floats values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        return __builtin_shuffle(values, codes); // looks at the lowest four bits only
#else
        return __builtin_convertvector(codes & 15, Floats) - 8.f;
#endif
    }
};

// Their unit is multiplied by with the scale, once for each group, unless products could become too small without it.
struct SmallFloats {
    static constexpr long BYTES = PANEL;
    static constexpr float UNIT = SMALL_FLOATS_SCALE > 0x1p16f ? 1 : SMALL_FLOATS_SCALE;
    static inline void read_panel(const uint8_t *from, Floats *to) {
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            to[part] = small_floats(from + part * LANES);
            if constexpr (UNIT != SMALL_FLOATS_SCALE) to[part] *= SMALL_FLOATS_SCALE;
        }
    }
};

struct Weights {
    const uint8_t *codes;
    const void *scales;
    const uint8_t *zeros;
    const int32_t *runs; // [runs, 3]: first input, end, group
    long inputs, groups, count, scale_type, scale_width;

    // Scales, of what codes become, and zeros of a group of inputs in a panel.
    template <typename Codes> void read_scales_of(long panel, long group, Floats *scale) const {
        const long at = (panel * groups + group) * scale_width;
        for (int part = 0; part < PANEL_VECTORS; ++part)
            scale[part] = Codes::UNIT * (scale_width == 1 ? all(read_scale(scales, scale_type, at))
                                                          : read_scales(scales, scale_type, at + part * LANES));
    }
    template <typename Codes> void read_zeros_of(long panel, long group, Floats *zero) const {
        Codes::read_panel(zeros + (panel * groups + group) * Codes::BYTES, zero);
    }
};

// Weights in a tile are floats already.
struct Tile {
    static constexpr long BYTES = PANEL * sizeof(float);
    static inline void read_panel(const uint8_t *from, Floats *to) {
        const float *const values = reinterpret_cast<const float *>(from);
        for (int part = 0; part < PANEL_VECTORS; ++part) to[part] = load(values + part * LANES);
    }
};

constexpr int AHEAD = 1024; // bytes between what is used and what is prefetched

// Adds scale * (ROWS rows of x times one run of a panel) to `totals`; rows are `x_row` and `totals_row` apart. BESIDE:
// the first inputs of all rows of x lie beside each other, then the second ones.
template <typename Codes, int ROWS, bool ZEROS, bool BESIDE = false>
inline void add_run(const float *x, long x_row, const uint8_t *codes, long count, const Floats *zero,
                    const Floats *scale, float *totals, long totals_row) {
    Floats sums[ROWS][PANEL_VECTORS] = {};
    for (long at = 0; at < count; ++at, codes += Codes::BYTES) {
        Floats weights[PANEL_VECTORS];
        Codes::read_panel(codes, weights);
        __builtin_prefetch(codes + AHEAD, 0, 2);
        if (ZEROS)
            for (int part = 0; part < PANEL_VECTORS; ++part) weights[part] -= zero[part];
        // In this order, since GCC 12 keeps too many values in registers with the loops swapped.
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part)
                sums[row][part] += x[BESIDE ? at * ROWS + row : row * x_row + at] * weights[part];
    }
    for (int row = 0; row < ROWS; ++row)
        for (int part = 0; part < PANEL_VECTORS; ++part) {
            float *const total = totals + row * totals_row + part * LANES;
            store(total, load(total) + sums[row][part] * scale[part]);
        }
}

template <typename Codes, bool ZEROS> struct Direct {
    // ROWS rows of x times one panel.
    template <int ROWS>
    static void multiply(const float *x, const Weights &weights, long panel, const float *bias, float *output,
                         long output_row, long width) {
        float totals[ROWS][PANEL] = {};
        const uint8_t *const codes = weights.codes + panel * weights.inputs * Codes::BYTES;
        for (long run = 0; run < weights.count; ++run) {
            const int32_t first = weights.runs[3 * run], end = weights.runs[3 * run + 1];
            const long group = weights.runs[3 * run + 2];
            Floats scale[PANEL_VECTORS], zero[PANEL_VECTORS];
            weights.read_scales_of<Codes>(panel, group, scale);
            if (ZEROS) weights.read_zeros_of<Codes>(panel, group, zero);
            add_run<Codes, ROWS, ZEROS>(x + first, weights.inputs, codes + first * Codes::BYTES, end - first, zero,
                                        scale, totals[0], PANEL);
        }
        for (int row = 0; row < ROWS; ++row)
            for (long at = 0; at < width; ++at)
                output[row * output_row + at] = totals[row][at] + (bias ? bias[panel * PANEL + at] : 0.f);
    }
};

constexpr int AT_ONCE = 4; // panels that one row passes at once

// One row of x times AT_ONCE panels, each summed as by Direct: one by one, sums would wait for one another.
template <typename Codes, bool ZEROS>
void multiply_row(const float *x, const Weights &weights, long panel, const float *bias, float *output, long width) {
    Floats totals[AT_ONCE][PANEL_VECTORS] = {};
    const long size = weights.inputs * Codes::BYTES;
    const uint8_t *const codes = weights.codes + panel * size;
    for (long run = 0; run < weights.count; ++run) {
        const int32_t first = weights.runs[3 * run], end = weights.runs[3 * run + 1];
        const long group = weights.runs[3 * run + 2];
        Floats sums[AT_ONCE][PANEL_VECTORS] = {}, zero[AT_ONCE][PANEL_VECTORS];
        if (ZEROS)
            for (int next = 0; next < AT_ONCE; ++next) weights.read_zeros_of<Codes>(panel + next, group, zero[next]);
        for (long at = first; at < end; ++at)
#pragma GCC unroll 4
            for (int next = 0; next < AT_ONCE; ++next) {
                Floats values[PANEL_VECTORS];
                Codes::read_panel(codes + next * size + at * Codes::BYTES, values);
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    sums[next][part] += x[at] * (ZEROS ? values[part] - zero[next][part] : values[part]);
            }
        for (int next = 0; next < AT_ONCE; ++next) {
            Floats scale[PANEL_VECTORS];
            weights.read_scales_of<Codes>(panel + next, group, scale);
            for (int part = 0; part < PANEL_VECTORS; ++part) totals[next][part] += sums[next][part] * scale[part];
        }
    }
    for (int next = 0; next < AT_ONCE; ++next)
        for (long at = 0; at < (next + 1 < AT_ONCE ? PANEL : width); ++at) {
            const long result = next * PANEL + at;
            output[result] = totals[next][at / LANES][at % LANES] + (bias ? bias[panel * PANEL + result] : 0.f);
        }
}

struct Tiled {
    // ROWS rows of x, beside each other, times a tile.
    template <int ROWS>
    static void multiply(const float *x, const float *tile, long count, const Floats *scale,
                         float *totals, long totals_row) {
        add_run<Tile, ROWS, false, true>(x, 0, reinterpret_cast<const uint8_t *>(tile), count, nullptr, scale, totals,
                                         totals_row);
    }
};

constexpr long TILED_ROWS = 20 * PRODUCT_ROWS; // that pass a tile together
constexpr long TILED_INPUTS = 512;             // of x, laid out for them: both fit the L2 cache

// Many rows times the panels of one thread.
template <typename Codes, bool ZEROS>
void multiply_many(const float *x, long rows, const Weights &weights, long first_panel, long end_panel,
                   const float *bias, long outputs, float *output) {
    const long panels = end_panel - first_panel, stride = panels * PANEL;
    const long most = std::min(rows, TILED_ROWS);
    std::vector<float> totals(most * stride), laid_out(most * TILED_INPUTS), tile(TILED_INPUTS * PANEL);
    for (long from = 0; from < rows; from += TILED_ROWS) {
        const long count = std::min(TILED_ROWS, rows - from);
        std::fill(totals.begin(), totals.begin() + count * stride, 0.f);
        for (long run = 0, next; run < weights.count; run = next) {
            const long first = weights.runs[3 * run];
            for (next = run + 1; next < weights.count; ++next)
                if (weights.runs[3 * next + 1] - first > TILED_INPUTS) break;
            const long end = weights.runs[3 * next - 2];
            for (long row = 0; row < count; row += PRODUCT_ROWS) {
                const float *const own = x + (from + row) * weights.inputs + first;
                const auto read = [&](long row, long at, auto &found) {
                    std::memcpy(&found, own + row * weights.inputs + at, sizeof found);
                };
                lay_beside(std::min<long>(PRODUCT_ROWS, count - row), end - first, read, &laid_out[row * TILED_INPUTS]);
            }
            for (long panel = first_panel; panel < end_panel; ++panel)
                for (long each = run; each < next; ++each) {
                    const long begin = weights.runs[3 * each], length = weights.runs[3 * each + 1] - begin;
                    const long group = weights.runs[3 * each + 2];
                    Floats scale[PANEL_VECTORS], zero[PANEL_VECTORS] = {};
                    weights.read_scales_of<Codes>(panel, group, scale);
                    if (ZEROS) weights.read_zeros_of<Codes>(panel, group, zero);
                    const uint8_t *codes = weights.codes + (panel * weights.inputs + begin) * Codes::BYTES;
                    for (long at = 0; at < length; ++at, codes += Codes::BYTES) {
                        Floats values[PANEL_VECTORS];
                        Codes::read_panel(codes, values);
                        for (int part = 0; part < PANEL_VECTORS; ++part)
                            store(tile.data() + at * PANEL + part * LANES, values[part] - zero[part]);
                    }
                    for (long row = 0; row < count; row += PRODUCT_ROWS) {
                        const long some = std::min<long>(PRODUCT_ROWS, count - row);
                        multiplies<Tiled>.by_rows[some](&laid_out[row * TILED_INPUTS + (begin - first) * some],
                                                        tile.data(), length, scale,
                                                        &totals[row * stride + (panel - first_panel) * PANEL], stride);
                    }
                }
        }
        for (long row = 0; row < count; ++row)
            for (long at = first_panel * PANEL; at < std::min(outputs, end_panel * PANEL); ++at)
                output[(from + row) * outputs + at] =
                    totals[row * stride + at - first_panel * PANEL] + (bias ? bias[at] : 0.f);
    }
}

template <typename Codes, bool ZEROS>
void multiply_all(const float *x, long rows, const Weights &weights, const float *bias, long outputs,
                  float *output) {
    const long panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        const long threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const long first = panels * thread / threads, end = panels * (thread + 1) / threads;
        if (rows > PRODUCT_ROWS && end > first)
            multiply_many<Codes, ZEROS>(x, rows, weights, first, end, bias, outputs, output);
        else if (rows > 0) {
            const auto width_of = [&](long panel) { return std::min<long>(PANEL, outputs - panel * PANEL); };
            long panel = first;
            for (; rows == 1 && panel + AT_ONCE <= end; panel += AT_ONCE)
                multiply_row<Codes, ZEROS>(x, weights, panel, bias, output + panel * PANEL,
                                           width_of(panel + AT_ONCE - 1));
            for (; panel < end; ++panel)
                multiplies<Direct<Codes, ZEROS>>.by_rows[rows](x, weights, panel, bias, output + panel * PANEL, outputs,
                                                               width_of(panel));
        }
    }
}

template <typename Codes>
void multiply_kind(const float *x, long rows, const Weights &weights, const float *bias, long outputs,
                   float *output) {
    const auto multiply_those = weights.zeros ? multiply_all<Codes, true> : multiply_all<Codes, false>;
    multiply_those(x, rows, weights, bias, outputs, output);
}

} // namespace

extern "C" {

void multiply_quantised(const float *x, long rows, long inputs, long kind, const uint8_t *codes,
                        const void *scales, long scale_type, long scale_width, const uint8_t *zeros,
                        long groups, const int32_t *runs, long count, const float *bias, long outputs,
                        float *output) {
    const Weights weights{codes, scales, zeros, runs, inputs, groups, count, scale_type, scale_width};
    if (kind == 0) multiply_kind<Nibbles>(x, rows, weights, bias, outputs, output);
    if (kind == 1) multiply_kind<SignedBytes>(x, rows, weights, bias, outputs, output);
    if (kind == 2) multiply_all<SmallFloats, false>(x, rows, weights, bias, outputs, output);
}
}

REPEATS(multiply_quantised);
