// Products of float32 activations with weights in mxfp4, in panels, of groups of rows, each with a matrix of its own.
// `products.py` documents the arguments.

#include "products.h"
#include "replay.h"

namespace {

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

REPEATS(multiply_mxfp4);
