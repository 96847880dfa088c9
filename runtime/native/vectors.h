// Vectors as wide as this build's registers, and the layout of weights in panels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace {

// As wide as the registers: GCC splits wider vectors through the stack. SUMS fit in them, and the results of
// PRODUCT_ROWS rows with a panel.
#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 16, PRODUCT_ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, SUMS = 12, PRODUCT_ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, SUMS = 16, PRODUCT_ROWS = 8;
#else
constexpr int LANES = 4, SUMS = 12, PRODUCT_ROWS = 6;
#endif

// Weights [out, in] are kept as panels [out / PANEL, in, PANEL], so that PANEL results are computed together.
constexpr int PANEL_VECTORS = 2, PANEL = PANEL_VECTORS * LANES;

// How many pieces threads share a product in: for many rows several each, so that one that another program slows
// down leaves more to the others. For few rows, which are over too soon, one each.
constexpr long PIECES = 8;
inline long count_pieces(long panels, long rows) {
    constexpr long FROM_ROWS = 16;
    const long threads = omp_get_max_threads();
    return std::min(panels, threads == 1 || rows < FROM_ROWS ? threads : PIECES * threads);
}

#if defined(__aarch64__)
// Which of ARM's newer instructions the processor has. By Linux's numbers: C libraries may be too old for the names.
inline bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }
inline bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }
inline bool has_bf16() { return getauxval(AT_HWCAP2) >> 14 & 1; }

// Before such an instruction, since the assembler takes no more than what all processors of the build have. It counts
// for the rest of the file, so nothing is left out that a compiler may be told to use.
#define NEWER ".arch armv8.6-a+sve2\n\t"
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Floats load(const float *from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Ints load_words(const int32_t *from) {
    Ints words;
    std::memcpy(&words, from, sizeof words);
    return words;
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
#elif defined(__aarch64__)
inline uint8x8_t four_bytes(const void *from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    return vreinterpret_u8_u32(vdup_n_u32(word));
}
inline Ints widened(const int8_t *from) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(from)))));
}
inline Ints widened(const uint8_t *from) {
    return (Ints)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(from))));
}
inline Ints widened(const uint16_t *from) { return (Ints)vmovl_u16(vld1_u16(from)); }
#else
template <typename Small> inline Ints widened(const Small *from) {
    Ints values;
    for (int lane = 0; lane < LANES; ++lane) values[lane] = from[lane];
    return values;
}
#endif

inline Floats all(float value) { return Floats{} + value; }

inline Floats as_floats(const Ints &bits) {
    Floats values;
    std::memcpy(&values, &bits, sizeof values);
    return values;
}

inline Ints as_bits(const Floats &values) {
    Ints bits;
    std::memcpy(&bits, &values, sizeof bits);
    return bits;
}

// A float of 16 bits: the upper half of one of 32 bits, rounded to the nearest, the even one of two that are
// equally near.
struct Bfloat16 {
    uint16_t bits;
    Bfloat16() = default;
    Bfloat16(float value) {
        uint32_t whole;
        std::memcpy(&whole, &value, sizeof whole);
        bits = value != value ? 0x7fc0 : (whole + 0x7fff + ((whole >> 16) & 1)) >> 16;
    }
    operator float() const {
        const uint32_t whole = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &whole, sizeof value);
        return value;
    }
};

inline Floats load(const Bfloat16 *from) {
    return as_floats(widened(reinterpret_cast<const uint16_t *>(from)) << 16);
}

// The bits of numbers that are rounded to 16 bits, in the lower halves; the upper halves are anything.
inline Ints as_bfloat16(const Floats &values) {
    const Ints bits = as_bits(values);
    const Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? Ints{} + 0x7fc0 : rounded;
}

inline void store(Bfloat16 *to, const Floats &values) {
    const Ints bits = as_bfloat16(values);
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__AVX2__)
    const __m256i lower = (__m256i)(bits & 0xffff);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_packus_epi32(_mm256_castsi256_si128(lower),
                                                                       _mm256_extracti128_si256(lower, 1)));
#elif defined(__aarch64__)
    vst1_u16(&to->bits, vmovn_u32((uint32x4_t)bits));
#else
    for (int lane = 0; lane < LANES; ++lane) to[lane].bits = static_cast<uint16_t>(bits[lane]);
#endif
}

#if defined(__aarch64__)
// Floats of 16 bits with an exponent of 5 as floats. GCC 12 takes the intrinsic for one that reads memory, and stores
// all sums before it.
inline Floats widened_halves(uint16x4_t halves) {
    Floats values;
    asm("fcvtl %0.4s, %1.4h" : "=w"(values) : "w"(halves));
    return values;
}
#endif

// Numbers in the lower halves of words, floats of 16 bits with an exponent of 5, as floats.
inline Floats from_float16(const Ints &words) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m256i lower = (__m256i)(words & 0xffff);
    return (Floats)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(lower),
                                                    _mm256_extracti128_si256(lower, 1)));
#elif defined(__aarch64__)
    return widened_halves(vmovn_u32((uint32x4_t)words));
#else
    // Exponents are 15 from zero instead of 127; subnormals come right by the product.
    const Ints sign = (words & 0x8000) << 16, rest = (words & 0x7fff) << 13;
    const Ints special = (rest >= 0x7c00 << 13) & (0xff << 23);
    return as_floats(as_bits(as_floats(rest) * all(0x1p112f)) | special | sign);
#endif
}

// Floats as a number of this type keeps them.
template <typename Value> inline Floats kept_as(const Floats &values) { return values; }
template <> inline Floats kept_as<Bfloat16>(const Floats &values) { return as_floats(as_bfloat16(values) << 16); }

// Copies numbers to an array of another type, or of the same one.
template <typename From, typename To> inline void convert(const From *from, long count, To *to) {
    long at = 0;
    for (; at + LANES <= count; at += LANES) store(to + at, load(from + at));
    for (; at < count; ++at) to[at] = To(static_cast<float>(from[at]));
}

// The lowest bytes of integers.
inline void narrow(const Ints &values, uint8_t *to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)values));
#elif defined(__AVX2__)
    const __m256i lowest = (__m256i)(values & 0xff);
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(to), _mm_packus_epi16(shorts, shorts));
#elif defined(__aarch64__)
    const uint16x4_t shorts = vmovn_u32((uint32x4_t)values);
    const uint32x2_t bytes = vreinterpret_u32_u8(vmovn_u16(vcombine_u16(shorts, shorts)));
    const uint32_t word = vget_lane_u32(bytes, 0);
    std::memcpy(to, &word, sizeof word);
#else
    for (int lane = 0; lane < LANES; ++lane) to[lane] = static_cast<uint8_t>(values[lane]);
#endif
}

// The nearest integers of floats in [-2^22, 2^22], the even ones of two that are equally near.
inline Ints nearest(const Floats &values) {
    const Floats shifted = values + 0x1.8p23f;
    return as_bits(shifted) - as_bits(all(0x1.8p23f));
}

// E4M3: one sign, four bits of exponent, three of fraction. The same bits in a float of 16 or 32 bits are the
// number divided by a power of two; those of 16 bits are used where the processor converts them, because some
// processors are slow with subnormal floats of 32 bits.
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr float SMALL_FLOATS_SCALE = 0x1p8f;
inline Floats small_floats(const uint8_t *from) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
    return (Floats)_mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
#elif defined(__AVX2__) && defined(__F16C__)
constexpr float SMALL_FLOATS_SCALE = 0x1p8f;
inline Floats small_floats(const uint8_t *from) {
    const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7);
    return (Floats)_mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}
#elif defined(__aarch64__)
constexpr float SMALL_FLOATS_SCALE = 0x1p8f;
inline Floats small_floats(const uint8_t *from) {
    const int16x4_t halves = vget_low_s16(vshll_n_s8(vreinterpret_s8_u8(four_bytes(from)), 7));
    return widened_halves(vand_u16(vreinterpret_u16_s16(halves), vdup_n_u16(0xbf80)));
}
#else
constexpr float SMALL_FLOATS_SCALE = 0x1p120f;
inline Floats small_floats(const uint8_t *from) {
    const Ints bits = widened(reinterpret_cast<const int8_t *>(from)) << 20; // the sign is in all higher bits
    return as_floats(bits & static_cast<int32_t>(0x87f00000u));
}
#endif

// The codes of the nearest numbers in E4M3, the even ones of two that are equally near; the largest is 448.
inline Ints as_small_floats(const Floats &values) {
    const Ints bits = as_bits(values), sign = bits & static_cast<int32_t>(0x80000000u);
    const Ints size = bits & 0x7fffffff;
    Floats magnitude = as_floats(size);
    magnitude = magnitude > all(448.f) ? all(448.f) : magnitude;
    const Ints whole = as_bits(magnitude);
    const Ints normal = ((whole + 0x7ffff + ((whole >> 20) & 1)) >> 20) - (120 << 3);
    const Ints subnormal = as_bits(magnitude + 0x1p14f) - as_bits(all(0x1p14f)); // in units of 2^-9
    const Ints code = magnitude < all(0x1p-6f) ? subnormal : normal;
    return (size > 0x7f800000 ? Ints{} + 0x7f : code) | ((sign >> 24) & 0x80);
}

// Calls run(sample) with a value of the type of a number in `library.py`.
template <typename Run> inline void with_type(long type, Run run) {
    if (type == 2) return run(Bfloat16{});
    run(float{});
}

} // namespace
