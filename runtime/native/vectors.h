// Vectors as wide as this build's registers, and the layout of weights in panels.

#pragma once

#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// As wide as the registers: GCC splits wider vectors through the stack. SUMS fit in them, and the results of
// PRODUCT_ROWS rows with a panel.
#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 16, PRODUCT_ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12, PRODUCT_ROWS = 6;
#else
constexpr int LANES = 4, SUMS = 12, PRODUCT_ROWS = 6;
#endif

// Weights [out, in] are kept as panels [out / PANEL, in, PANEL], so that PANEL results are computed together.
constexpr int PANEL_VECTORS = 2, PANEL = PANEL_VECTORS * LANES;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float *from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store(float *to, const Floats &values) { std::memcpy(to, &values, sizeof values); }

// LANES small integers as large ones. GCC 12 makes dozens of instructions of anything but its intrinsics.
#if defined(__AVX512F__)
inline Ints widened(const int8_t *from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Ints widened(const uint8_t *from) {
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
inline Ints widened(const uint16_t *from) {
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
#elif defined(__AVX2__)
inline Ints widened(const int8_t *from) {
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
inline Ints widened(const uint8_t *from) {
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from)));
}
inline Ints widened(const uint16_t *from) {
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
#else
template <typename Small> inline Ints widened(const Small *from) {
    Ints values;
    for (int lane = 0; lane < LANES; ++lane) values[lane] = from[lane];
    return values;
}
#endif

inline Floats all(float value) { return Floats{} + value; }

} // namespace
