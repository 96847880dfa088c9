// How a KV cache keeps the values of a head: as they are, or packed into bytes. `kv_cache/formats.py` has the same
// for torch, and both give the same bytes. Another format is another of these structs, and a line in
// `with_format`.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <type_traits>

namespace {

// `load` gives LANES values from number `at` on; they are to be multiplied by `scale`.
template <typename Value> struct PlainHead {
    static constexpr bool PACKED = !std::is_same<Value, float>::value; // whether they are no floats of 32 bits
    static inline long bytes(long dim) { return dim * static_cast<long>(sizeof(Value)); }
    static inline Floats load_at(const uint8_t *head, long at) {
        return load(reinterpret_cast<const Value *>(head) + at);
    }
    static inline float scale(const uint8_t *, long) { return 1; }
    static inline void write(const Value *values, long dim, uint8_t *head) {
        std::memcpy(head, values, bytes(dim));
    }
};

// LANES of `dim` values from number `at` on; zeros behind the last.
template <typename Value> inline Floats load_some(const Value *values, long at, long dim) {
    if (at + LANES <= dim) return load(values + at);
    float some[LANES] = {};
    std::copy(values + at, values + dim, some);
    return load(some);
}

inline void write_codes(const Ints &codes, long at, long dim, uint8_t *head) {
    uint8_t bytes[LANES];
    narrow(codes, bytes);
    std::memcpy(head + at, bytes, std::min<long>(LANES, dim - at));
}

// E4M3 without a scale. What is larger than its largest number, 448, becomes that.
struct Fp8Head {
    static constexpr bool PACKED = true;
    static inline long bytes(long dim) { return dim; }
    static inline Floats load_at(const uint8_t *head, long at) { return small_floats(head + at); }
    static inline float scale(const uint8_t *, long) { return SMALL_FLOATS_SCALE; }
    template <typename Value> static inline void write(const Value *values, long dim, uint8_t *head) {
        for (long at = 0; at < dim; at += LANES)
            write_codes(as_small_floats(load_some(values, at, dim)), at, dim, head);
    }
};

// Integers of 8 bits, and behind them a float by which they are multiplied: the largest magnitude / 127.
struct Int8Head {
    static constexpr bool PACKED = true;
    static inline long bytes(long dim) { return dim + static_cast<long>(sizeof(float)); }
    static inline Floats load_at(const uint8_t *head, long at) {
        return __builtin_convertvector(widened(reinterpret_cast<const int8_t *>(head) + at), Floats);
    }
    static inline float scale(const uint8_t *head, long dim) {
        float value;
        std::memcpy(&value, head + dim, sizeof value);
        return value;
    }
    template <typename Value> static inline void write(const Value *values, long dim, uint8_t *head) {
        Ints most = {}; // magnitudes are ordered as their bits are, with NaN above all
        for (long at = 0; at < dim; at += LANES) {
            const Ints each = as_bits(load_some(values, at, dim)) & 0x7fffffff;
            most = each > most ? each : most;
        }
        int32_t top = 0;
        for (int lane = 0; lane < LANES; ++lane) top = std::max(top, most[lane]);
        float scale;
        std::memcpy(&scale, &top, sizeof scale);
        scale /= 127;
        for (long at = 0; at < dim; at += LANES) {
            Floats quotient = scale > 0 ? load_some(values, at, dim) / scale : Floats{};
            quotient = quotient > all(127.f) ? all(127.f) : quotient < all(-127.f) ? all(-127.f) : quotient;
            write_codes(nearest(quotient), at, dim, head);
        }
        std::memcpy(head + dim, &scale, sizeof scale);
    }
};

// Calls run(format) with the format of a number in `kv_cache/formats.py`, for values of a type.
template <typename Value, typename Run> inline void with_format(long kind, Run run) {
    switch (kind) {
    case 1: return run(Fp8Head{});
    case 2: return run(Int8Head{});
    default: return run(PlainHead<Value>{});
    }
}

} // namespace
