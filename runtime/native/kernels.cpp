// What a step computes on CPUs besides products with weights (products.cpp): one pass over each value where
// torch's operators need several; attention that reads the paged KV cache in place. Values are float32 or
// bfloat16, and are computed with in float32.
// `kernels.py` documents the arguments. All arrays are row-major; sizes are counts of values.
//
// The OpenMP threads are torch's: its library is loaded first, so the linker finds its symbols.

#include "kv_formats.h"
#include "replay.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr long PARALLEL_FROM = 1 << 15; // values; with fewer, waking a thread takes longer than it saves

// The greatest divisor that is not above `most`.
constexpr int divisor(int of, int most) {
    while (of % most != 0) --most;
    return most;
}

// Adds halves pairwise, which rounds less than adding one after the other. GCC 12 makes a loop through memory of
// anything but its intrinsics wherever a function is large.
inline float sum(const Floats &values) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256d upper = _mm512_extractf64x4_pd((__m512d)values, 1);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)values), _mm256_castpd_ps(upper));
#else
    const __m256 eight = (__m256)values;
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__)
    return vaddvq_f32(values);
#else
    float lanes[LANES];
    store(lanes, values);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
#endif
}

// `other` gives the vector of a number.
template <int VECTORS, typename Other> inline float dot(const Floats *one, Other other) {
    constexpr int CHAINS = divisor(VECTORS, std::min(VECTORS, 4));
    Floats products[CHAINS];
    for (int part = 0; part < CHAINS; ++part) products[part] = one[part] * other(part);
    for (int part = CHAINS; part < VECTORS; ++part) products[part % CHAINS] += one[part] * other(part);
    for (int part = 1; part < CHAINS; ++part) products[0] += products[part];
    return sum(products[0]);
}

// e^x with a relative error of 1e-7 for x in [-87, 88], clamped outside; NaN stays NaN.
inline Floats exponential(Floats x) {
    x = x < all(-87.f) ? all(-87.f) : x;
    x = x > all(88.f) ? all(88.f) : x;
    Floats turns = x * 1.44269504f;
    Ints power = __builtin_convertvector(turns + (turns < 0.f ? all(-.5f) : all(.5f)), Ints);
    turns = __builtin_convertvector(power, Floats);
    // ln 2 in two parts, the first with few enough digits that the product is exact
    Floats rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    Floats series = all(1.f / 5040);
    const float terms[] = {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f};
    for (float term : terms) series = series * rest + term;
    Ints bits = (power + 127) << 23;
    return series * as_floats(bits);
}

inline Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    const Floats near = x * (1.f + square * (-1.f / 3 + square * (2.f / 15 - square * (17.f / 315))));
    return square < .0625f ? near : 1.f - 2.f / (exponential(2.f * x) + 1.f);
}

// How scores become weights. `cap` and `sinks` as in `attention/base.py`; no cap is 0, no sinks are null.
struct Scoring {
    float scale, cap;
    const float *sinks; // one for each query head

    float sink(long head) const { return sinks ? sinks[head] : -INFINITY; }

    // Squeezes scores [padded] into (-cap, cap).
    void squeeze(float *scores, long padded) const {
        if (cap == 0) return;
        for (long at = 0; at < padded; at += LANES)
            store(scores + at, hyperbolic_tangent(load(scores + at) / cap) * cap);
    }
};

// Turns scores [padded], of which the first `count` count, into weights that add up to one with the sink's.
void softmax(float *scores, long count, long padded, float sink) {
    std::fill(scores + count, scores + padded, -INFINITY);
    Floats most = all(-INFINITY);
    for (long at = 0; at < padded; at += LANES) {
        Floats each = load(scores + at);
        most = each > most ? each : most;
    }
    float top = sink;
    for (int lane = 0; lane < LANES; ++lane) top = std::max(top, most[lane]);
    Floats total = {};
    for (long at = 0; at < padded; at += LANES) {
        Floats weight = exponential(load(scores + at) - top);
        store(scores + at, weight);
        total += weight;
    }
    const float share = 1 / (sum(total) + (sink == -INFINITY ? 0 : std::exp(sink - top)));
    for (long at = 0; at < padded; at += LANES) store(scores + at, load(scores + at) * share);
}

struct Context {
    const int32_t *table;
    long first, end, block_tokens;

    // Calls do_run(token, slot, count) for each block's part of the context.
    template <typename Run> void runs(Run do_run) const {
        for (long token = first; token < end;) {
            const long within = token % block_tokens;
            const long count = std::min(block_tokens - within, end - token);
            do_run(token - first, table[token / block_tokens] * block_tokens + within, count);
            token += count;
        }
    }
};

// HEADS query heads from `first_head` on that share a KV head, which the cache keeps as `Head`; keys and values
// point at this head of slot 0, slots are `row` bytes apart.
template <typename Head, int DIM, int HEADS>
void attend(const float *query, const uint8_t *keys, const uint8_t *values, long row, const Context &context,
            const Scoring &scoring, long first_head, float *scores, long padded, float *output) {
    constexpr int VECTORS = DIM / LANES, PARTS = divisor(VECTORS, std::min(VECTORS, SUMS / HEADS));
    Floats asked[HEADS][VECTORS];
    for (int head = 0; head < HEADS; ++head)
        for (int part = 0; part < VECTORS; ++part)
            asked[head][part] = load(query + head * DIM + part * LANES) * scoring.scale;
    context.runs([&](long token, long slot, long count) {
        for (long each = 0; each < count; ++each) {
            const uint8_t *key = keys + (slot + each) * row;
            float *const own = scores + token + each;
            if constexpr (Head::PACKED) {
                Floats held[VECTORS]; // unpacked once for all query heads
                for (int part = 0; part < VECTORS; ++part) held[part] = Head::load_at(key, part * LANES);
                const float scale = Head::scale(key, DIM);
                for (int head = 0; head < HEADS; ++head)
                    own[head * padded] = dot<VECTORS>(asked[head], [&](int part) { return held[part]; }) * scale;
            } else {
                const auto held = [&](int part) { return Head::load_at(key, part * LANES); };
                for (int head = 0; head < HEADS; ++head) own[head * padded] = dot<VECTORS>(asked[head], held);
            }
        }
    });
    for (int head = 0; head < HEADS; ++head) {
        scoring.squeeze(scores + head * padded, padded);
        softmax(scores + head * padded, context.end - context.first, padded, scoring.sink(first_head + head));
    }
    for (int from = 0; from < DIM; from += PARTS * LANES) {
        Floats answer[HEADS][PARTS] = {};
        context.runs([&](long token, long slot, long count) {
            for (long each = 0; each < count; ++each) {
                const uint8_t *value = values + (slot + each) * row;
                const float scale = Head::scale(value, DIM);
                float weights[HEADS];
                for (int head = 0; head < HEADS; ++head)
                    weights[head] = scores[head * padded + token + each] * scale;
                for (int part = 0; part < PARTS; ++part) {
                    const Floats seen = Head::load_at(value, from + part * LANES);
                    for (int head = 0; head < HEADS; ++head) answer[head][part] += weights[head] * seen;
                }
            }
        });
        for (int head = 0; head < HEADS; ++head)
            for (int part = 0; part < PARTS; ++part)
                store(output + head * DIM + from + part * LANES, answer[head][part]);
    }
}

// A row of a chunk is one head of one token. TILE rows attend together: as many as the registers hold.
constexpr int TILE = 12;

struct Row {
    const float *query;
    long first, end; // of the tokens it attends to, counted from the first one of the context
    float *output;
    float sink;
};

// TILE rows over keys packed in [tokens / LANES, dim, LANES]. `values` are of one head, `row` values apart.
template <int DIM>
void attend_tile(const Row *rows, const float *packed, const float *values, long row, const Context &context,
                 const Scoring &scoring, float *scores, long padded) {
    // rows, and parts of them, that read their values together
    constexpr int VECTORS = DIM / LANES, PARTS = divisor(VECTORS, std::min(VECTORS, 6));
    constexpr int SOME = divisor(TILE, SUMS / PARTS);
    const long low = rows[0].first / LANES * LANES, high = rows[TILE - 1].end;
    for (long token = low; token < high; token += LANES) {
        Floats product[TILE] = {};
        const float *key = packed + token * DIM;
        for (int at = 0; at < DIM; ++at, key += LANES) {
            const Floats each = load(key);
            for (int n = 0; n < TILE; ++n) product[n] += rows[n].query[at] * each;
        }
        for (int n = 0; n < TILE; ++n) store(scores + n * padded + token, product[n] * scoring.scale);
    }
    for (int n = 0; n < TILE; ++n) {
        float *own = scores + n * padded;
        const long end = (high - low + LANES - 1) / LANES * LANES;
        scoring.squeeze(own + low, end);
        std::fill(own + low, own + rows[n].first, -INFINITY);
        softmax(own + low, rows[n].end - low, end, rows[n].sink);
        std::fill(own + low, own + rows[n].first, 0.f);
        std::fill(own + rows[n].end, own + low + end, 0.f);
    }
    const Context seen{context.table, context.first + low, context.first + high, context.block_tokens};
    for (int n = 0; n < TILE; n += SOME)
        for (int from = 0; from < DIM; from += PARTS * LANES) {
            Floats answer[SOME][PARTS] = {};
            seen.runs([&](long token, long slot, long count) {
                const float *value = values + slot * row + from, *weight = scores + n * padded + low + token;
                for (long each = 0; each < count; ++each, value += row, ++weight)
                    for (int part = 0; part < PARTS; ++part) {
                        const Floats held = load(value + part * LANES);
                        for (int m = 0; m < SOME; ++m) answer[m][part] += weight[m * padded] * held;
                    }
            });
            for (int m = 0; m < SOME; ++m)
                for (int part = 0; part < PARTS; ++part)
                    store(rows[n + m].output + from + part * LANES, answer[m][part]);
        }
}

constexpr long MOST_DIM = 576;

template <typename Head> void read_head(const uint8_t *head, long dim, float *to) {
    const float scale = Head::scale(head, dim);
    for (long at = 0; at < dim; at += LANES) store(to + at, Head::load_at(head, at) * scale);
}

// Packs the keys of one head for `attend_tile`: block number `block` of LANES tokens, padded with zeros.
template <typename Head>
void pack(const uint8_t *keys, long row, const Context &context, long dim, long block, float *packed) {
    float *const to = packed + block * LANES * dim;
    const long first = context.first + block * LANES, end = std::min(context.end, first + LANES);
    if (end < first + LANES) std::fill(to, to + LANES * dim, 0.f);
    Context{context.table, first, end, context.block_tokens}.runs([&](long token, long slot, long count) {
        for (long each = 0; each < count; ++each) {
            float key[MOST_DIM];
            read_head<Head>(keys + (slot + each) * row, dim, key);
            for (long at = 0; at < dim; ++at) to[at * LANES + token + each] = key[at];
        }
    });
}

// Reads the values of LANES tokens of one head, in their order: block number `block`.
template <typename Head>
void unpack(const uint8_t *values, long row, const Context &context, long dim, long block, float *unpacked) {
    const long first = context.first + block * LANES, end = std::min(context.end, first + LANES);
    Context{context.table, first, end, context.block_tokens}.runs([&](long token, long slot, long count) {
        for (long each = 0; each < count; ++each)
            read_head<Head>(values + (slot + each) * row, dim, unpacked + (block * LANES + token + each) * dim);
    });
}

typedef void (*Attend)(const float *, const uint8_t *, const uint8_t *, long, const Context &, const Scoring &,
                       long, float *, long, float *);

template <typename Head, int DIM> Attend by_heads(long heads) {
    switch (heads) {
    case 1: return attend<Head, DIM, 1>;
    case 2: return attend<Head, DIM, 2>;
    case 3: return attend<Head, DIM, 3>;
    default: return attend<Head, DIM, 4>;
    }
}

// For one to four heads of `dim` values; null if this size is not compiled.
template <typename Head> Attend attend_for(long dim, long heads) {
    switch (dim) {
    case 16: return by_heads<Head, 16>(heads);
    case 32: return by_heads<Head, 32>(heads);
    case 64: return by_heads<Head, 64>(heads);
    case 80: return by_heads<Head, 80>(heads);
    case 96: return by_heads<Head, 96>(heads);
    case 128: return by_heads<Head, 128>(heads);
    case 192: return by_heads<Head, 192>(heads);
    case 256: return by_heads<Head, 256>(heads);
    case MOST_DIM: return by_heads<Head, MOST_DIM>(heads);
    default: return nullptr;
    }
}

typedef void (*AttendTile)(const Row *, const float *, const float *, long, const Context &, const Scoring &,
                           float *, long);

AttendTile attend_tile_for(long dim) {
    switch (dim) {
    case 16: return attend_tile<16>;
    case 32: return attend_tile<32>;
    case 64: return attend_tile<64>;
    case 80: return attend_tile<80>;
    case 96: return attend_tile<96>;
    case 128: return attend_tile<128>;
    case 192: return attend_tile<192>;
    case 256: return attend_tile<256>;
    case MOST_DIM: return attend_tile<MOST_DIM>;
    default: return nullptr;
    }
}

// Attention of a chunk; `packed` has room for its keys and, where the cache keeps no floats, for its values.
template <typename Head, typename Value>
void attend_rows(const Value *query, long query_row, const uint8_t *keys, const uint8_t *values,
                 const Context &context, long offset, long length, long window, long kv_heads, long group, long dim,
                 const Scoring &scoring, float *packed, Value *output) {
    const long head_bytes = Head::bytes(dim), cached = kv_heads * head_bytes;
    const long rows = length * group, tiles = (rows + TILE - 1) / TILE, width = kv_heads * group * dim;
    const long blocks = (context.end - context.first + LANES - 1) / LANES, padded = blocks * LANES;
    const AttendTile attend_tile_of = attend_tile_for(dim);
    float *const unpacked = packed + kv_heads * padded * dim;
    const int32_t only = 0;
    const long tokens = context.end - context.first;
    const Context seen = Head::PACKED ? Context{&only, 0, tokens, tokens} : context;
#pragma omp parallel
    {
        std::vector<float> scores(TILE * padded), asked(TILE * dim), answers(TILE * dim);
#pragma omp for
        for (long item = 0; item < kv_heads * blocks; ++item) {
            const long head = item / blocks, at = head * padded * dim;
            pack<Head>(keys + head * head_bytes, cached, context, dim, item % blocks, packed + at);
            if (Head::PACKED)
                unpack<Head>(values + head * head_bytes, cached, context, dim, item % blocks, unpacked + at);
        }
        // the last tiles attend to most tokens, so they go first
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < kv_heads * tiles; ++item) {
            const long head = item % kv_heads, tile = tiles - 1 - item / kv_heads;
            Row some[TILE];
            long places[TILE];
            for (int n = 0; n < TILE; ++n) {
                const long at = std::min(tile * TILE + n, rows - 1); // the last row again, to fill the tile
                const long token = at / group, within = (head * group + at % group) * dim;
                const long end = offset + token + 1;
                convert(query + token * query_row + within, dim, &asked[n * dim]);
                places[n] = token * width + within;
                some[n] = {&asked[n * dim], std::max(0L, end - window) - context.first, end - context.first,
                           &answers[n * dim], scoring.sink(head * group + at % group)};
            }
            const float *const own = Head::PACKED ? unpacked + head * padded * dim
                                                  : reinterpret_cast<const float *>(values) + head * dim;
            attend_tile_of(some, packed + head * padded * dim, own, Head::PACKED ? dim : kv_heads * dim, seen,
                           scoring, scores.data(), padded);
            for (int n = 0; n < TILE; ++n) convert(&answers[n * dim], dim, output + places[n]);
        }
    }
}

// Attention of `count` tokens, each of which has a span of the cache.
template <typename Head, typename Value>
void attend_singles(const Value *query, long query_row, const uint8_t *keys, const uint8_t *values,
                    const int32_t *tables, const int32_t *spans, long count, long kv_heads, long group, long dim,
                    long block_tokens, const Scoring &scoring, Value *output) {
    const long head_bytes = Head::bytes(dim), row = kv_heads * head_bytes, output_row = kv_heads * group * dim;
#pragma omp parallel
    {
        std::vector<float> scores, asked(4 * dim), answers(4 * dim);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < count * kv_heads; ++item) {
            const int32_t *span = spans + item / kv_heads * 4;
            const long kv_head = item % kv_heads;
            const Context context{tables + span[3], span[1], span[2], block_tokens};
            const long padded = (context.end - context.first + LANES - 1) / LANES * LANES;
            scores.resize(std::max<size_t>(scores.size(), 4 * padded));
            for (long head = 0; head < group; head += 4) {
                const long at = (kv_head * group + head) * dim, heads = std::min(4L, group - head);
                convert(query + span[0] * query_row + at, heads * dim, asked.data());
                attend_for<Head>(dim, heads)(asked.data(), keys + kv_head * head_bytes,
                                             values + kv_head * head_bytes, row, context, scoring,
                                             kv_head * group + head, scores.data(), padded, answers.data());
                convert(answers.data(), heads * dim, output + span[0] * output_row + at);
            }
        }
    }
}

// Rotates the pairs of a head's first 2 x half values.
template <typename Value> inline void turn(Value *head, const Value *cosine, const Value *sine, long half) {
    Value *const upper = head + half;
    long at = 0;
    for (; at + LANES <= half; at += LANES) {
        const Floats x = load(head + at), y = load(upper + at), c = load(cosine + at), s = load(sine + at);
        store(head + at, x * c - y * s);
        store(upper + at, y * c + x * s);
    }
    for (; at < half; ++at) {
        const float x = head[at], y = upper[at], c = cosine[at], s = sine[at];
        head[at] = x * c - y * s;
        upper[at] = y * c + x * s;
    }
}

template <typename Head, typename Value>
void turn_all(Value *heads, const Value *cosines, const Value *sines, const int64_t *slots, long count,
              long query_heads, long kv_heads, long dim, long half, uint8_t *keys, uint8_t *values) {
    const long width = (query_heads + 2 * kv_heads) * dim, head_bytes = Head::bytes(dim);
#pragma omp parallel for if (count * width >= PARALLEL_FROM)
    for (long token = 0; token < count; ++token) {
        Value *const own = heads + token * width;
        for (long head = 0; head < query_heads + kv_heads; ++head)
            turn(own + head * dim, cosines + token * half, sines + token * half, half);
        for (long head = 0; head < kv_heads; ++head) {
            const long to = (slots[token] * kv_heads + head) * head_bytes;
            const Value *const key = own + (query_heads + head) * dim;
            Head::write(key, dim, keys + to);
            Head::write(key + kv_heads * dim, dim, values + to);
        }
    }
}

// The weight's type says where numbers are rounded: as its own type, what is multiplied by it. May be in place.
template <typename Value, typename Weight>
inline void norm_row(const Value *from, const Weight *weight, float eps, long width, Value *to) {
    const long whole = width / LANES * LANES;
    Floats squares = {};
    for (long at = 0; at < whole; at += LANES) squares += load(from + at) * load(from + at);
    float total = sum(squares);
    for (long at = whole; at < width; ++at) total += static_cast<float>(from[at]) * from[at];
    const float scale = 1 / std::sqrt(total / width + eps);
    for (long at = 0; at < whole; at += LANES)
        store(to + at, kept_as<Weight>(load(from + at) * scale) * load(weight + at));
    for (long at = whole; at < width; ++at) to[at] = Weight(from[at] * scale) * weight[at];
}

template <typename Value, typename Weight>
void norm_rows(const Value *x, long x_row, const Weight *weight, float eps, long rows, long width, Value *output) {
#pragma omp parallel for if (rows * width >= PARALLEL_FROM)
    for (long row = 0; row < rows; ++row) norm_row(x + row * x_row, weight, eps, width, output + row * width);
}

// Rotates pairs of values, which are neighbours or `half` apart; in `to` they are `half` apart.
template <typename Value>
inline void turn_into(const Value *from, const Value *cosine, const Value *sine, long half, bool neighbours,
                      Value *to) {
    for (long at = 0; at < half; ++at) {
        const float x = from[neighbours ? 2 * at : at], y = from[neighbours ? 2 * at + 1 : half + at];
        const float c = cosine[at], s = sine[at];
        to[at] = x * c - y * s;
        to[half + at] = y * c + x * s;
    }
}

// Latents are kept [rank, 2 x half] for each token, and queries end in as many values to rotate as these do.
template <typename Value, typename Weight>
void turn_each_latent(const Value *queries, long queries_row, const Value *kept, long kept_row, const Weight *weight,
                      float eps, const Value *cosines, const Value *sines, bool neighbours, long count, long heads,
                      long query_dim, long rank, long half, Value *turned, long turned_row, long turned_head,
                      Value *key) {
    const long rope = 2 * half;
#pragma omp parallel for if (count * heads * rope >= PARALLEL_FROM)
    for (long token = 0; token < count; ++token) {
        const Value *const cosine = cosines + token * half, *const sine = sines + token * half;
        const Value *const own = kept + token * kept_row;
        Value *const to = key + token * (rank + rope);
        norm_row(own, weight, eps, rank, to);
        turn_into(own + rank, cosine, sine, half, neighbours, to + rank);
        for (long head = 0; head < heads; ++head)
            turn_into(queries + token * queries_row + (head + 1) * query_dim - rope, cosine, sine, half, neighbours,
                      turned + token * turned_row + head * turned_head);
    }
}

template <typename Value, typename Weight>
void layer_norm_rows(const Value *x, const Weight *weight, const Weight *bias, float eps, long rows, long width,
                     Value *output) {
    const long whole = width / LANES * LANES;
#pragma omp parallel for if (rows * width >= PARALLEL_FROM)
    for (long row = 0; row < rows; ++row) {
        const Value *const from = x + row * width;
        Value *const to = output + row * width;
        Floats sums = {}, squares = {};
        for (long at = 0; at < whole; at += LANES) sums += load(from + at);
        float total = sum(sums);
        for (long at = whole; at < width; ++at) total += from[at];
        const float mean = total / width;
        for (long at = 0; at < whole; at += LANES) {
            const Floats apart = load(from + at) - mean;
            squares += apart * apart;
        }
        total = sum(squares);
        for (long at = whole; at < width; ++at) total += (from[at] - mean) * (from[at] - mean);
        const float scale = 1 / std::sqrt(total / width + eps);
        for (long at = 0; at < whole; at += LANES)
            store(to + at, (load(from + at) - mean) * scale * load(weight + at) + load(bias + at));
        for (long at = whole; at < width; ++at) to[at] = (from[at] - mean) * scale * weight[at] + bias[at];
    }
}

template <typename Value> void relu_all(Value *values, long count) {
#pragma omp parallel for if (count >= PARALLEL_FROM)
    for (long at = 0; at < count / LANES * LANES; at += LANES) {
        const Floats x = load(values + at);
        store(values + at, x < 0.f ? Floats{} : x);
    }
    for (long at = count / LANES * LANES; at < count; ++at)
        if (values[at] < 0.f) values[at] = 0.f;
}

template <typename Value> void add_all(Value *to, const Value *from, long count) {
#pragma omp parallel for if (count >= PARALLEL_FROM)
    for (long at = 0; at < count / LANES * LANES; at += LANES) store(to + at, load(to + at) + load(from + at));
    for (long at = count / LANES * LANES; at < count; ++at) to[at] = static_cast<float>(to[at]) + from[at];
}

template <typename From, typename To> void convert_all(const From *from, long count, To *to) {
#pragma omp parallel for if (count >= PARALLEL_FROM)
    for (long at = 0; at < count / LANES * LANES; at += LANES) store(to + at, load(from + at));
    for (long at = count / LANES * LANES; at < count; ++at) to[at] = from[at];
}

// SiLU of x, and GELU by the tanh, which is a logistic curve: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
struct Silu {
    static Floats logit(const Floats &x) { return x; }
    static float logit(float x) { return x; }
};

struct Gelu {
    static constexpr float TWICE = 1.5957691216057308f, CUBED = 0.044715f; // 2 sqrt(2 / pi)
    static Floats logit(const Floats &x) { return TWICE * (x + CUBED * x * x * x); }
    static float logit(float x) { return TWICE * (x + CUBED * x * x * x); }
};

template <typename Curve, typename Value> void gate_rows(const Value *gate_up, long rows, long width, Value *output) {
    const long whole = width / LANES * LANES;
#pragma omp parallel for if (rows * width >= PARALLEL_FROM)
    for (long row = 0; row < rows; ++row) {
        const Value *const gates = gate_up + 2 * row * width, *const ups = gates + width;
        Value *const to = output + row * width;
        for (long at = 0; at < whole; at += LANES) {
            const Floats x = load(gates + at);
            store(to + at, x / (1.f + exponential(-Curve::logit(x))) * load(ups + at));
        }
        for (long at = whole; at < width; ++at) {
            const float x = gates[at];
            to[at] = x / (1 + std::exp(-Curve::logit(x))) * ups[at];
        }
    }
}

// The gate of gpt-oss: of clamped gates and ups, gate x sigmoid(sharpness x gate) x (up + 1).
template <typename Value>
void clamped_gate_rows(const Value *gate_up, long rows, long width, float sharpness, float limit, Value *output) {
    const long whole = width / LANES * LANES;
    const Floats most = all(limit), least = all(-limit);
#pragma omp parallel for if (rows * width >= PARALLEL_FROM)
    for (long row = 0; row < rows; ++row) {
        const Value *const gates = gate_up + 2 * row * width, *const ups = gates + width;
        Value *const to = output + row * width;
        for (long at = 0; at < whole; at += LANES) {
            Floats gate = load(gates + at), up = load(ups + at);
            gate = gate > most ? most : gate;
            up = up > most ? most : up;
            up = up < least ? least : up;
            store(to + at, gate / (1.f + exponential(-sharpness * gate)) * (up + 1.f));
        }
        for (long at = whole; at < width; ++at) {
            const float gate = std::min<float>(gates[at], limit);
            const float up = std::min(std::max<float>(ups[at], -limit), limit);
            to[at] = gate / (1 + std::exp(-sharpness * gate)) * (up + 1);
        }
    }
}

} // namespace

extern "C" {

int attends_to(long dim) { return attend_for<PlainHead<float>>(dim, 1) != nullptr; }

void attend_paged(const void *query, long type, long query_row, const uint8_t *keys, const uint8_t *values,
                  long format, const int32_t *tables, const int32_t *spans, long count, long kv_heads, long group,
                  long dim, long block_tokens, float scale, float cap, const float *sinks, void *output) {
    const Scoring scoring{scale, cap, sinks};
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_format<Value>(format, [&](auto kept) {
            attend_singles<decltype(kept)>(static_cast<const Value *>(query), query_row, keys, values, tables, spans,
                                           count, kv_heads, group, dim, block_tokens, scoring,
                                           static_cast<Value *>(output));
        });
    });
}

void attend_chunk(const void *query, long type, long query_row, const uint8_t *keys, const uint8_t *values,
                  long format, const int32_t *table, long offset, long length, long window, long kv_heads,
                  long group, long dim, long block_tokens, float scale, float cap, const float *sinks,
                  float *packed, void *output) {
    const Context context{table, std::max(0L, offset + 1 - window), offset + length, block_tokens};
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_format<Value>(format, [&](auto kept) {
            attend_rows<decltype(kept)>(static_cast<const Value *>(query), query_row, keys, values, context, offset,
                                        length, window, kv_heads, group, dim, Scoring{scale, cap, sinks}, packed,
                                        static_cast<Value *>(output));
        });
    });
}

void store_heads(const void *heads, long type, long heads_row, const int64_t *slots, long count, long kv_heads,
                 long dim, uint8_t *cached, long format) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        const Value *const values = static_cast<const Value *>(heads);
        with_format<Value>(format, [&](auto kept) {
            using Head = decltype(kept);
            const long head_bytes = Head::bytes(dim);
#pragma omp parallel for if (count * kv_heads * dim >= PARALLEL_FROM)
            for (long token = 0; token < count; ++token)
                for (long head = 0; head < kv_heads; ++head)
                    Head::write(values + token * heads_row + head * dim, dim,
                                cached + (slots[token] * kv_heads + head) * head_bytes);
        });
    });
}

void turn_and_store(void *heads, long type, const void *cosines, const void *sines, const int64_t *slots,
                    long count, long query_heads, long kv_heads, long dim, long half, uint8_t *keys,
                    uint8_t *values, long format) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_format<Value>(format, [&](auto kept) {
            turn_all<decltype(kept)>(static_cast<Value *>(heads), static_cast<const Value *>(cosines),
                                     static_cast<const Value *>(sines), slots, count, query_heads, kv_heads, dim,
                                     half, keys, values);
        });
    });
}

void turn_latents(const void *queries, long type, long queries_row, const void *kept, long kept_row, const void *weight,
                  long weight_type, float eps, const void *cosines, const void *sines, long neighbours, long count,
                  long heads, long query_dim, long rank, long half, void *turned, long turned_row, long turned_head,
                  void *key) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_type(weight_type, [&](auto of_weight) {
            turn_each_latent(static_cast<const Value *>(queries), queries_row, static_cast<const Value *>(kept),
                             kept_row, static_cast<const decltype(of_weight) *>(weight), eps,
                             static_cast<const Value *>(cosines), static_cast<const Value *>(sines), neighbours != 0,
                             count, heads, query_dim, rank, half, static_cast<Value *>(turned), turned_row,
                             turned_head, static_cast<Value *>(key));
        });
    });
}

void rms_norm(const void *x, long type, long x_row, const void *weight, long weight_type, float eps, long rows,
              long width, void *output) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_type(weight_type, [&](auto of_weight) {
            norm_rows(static_cast<const Value *>(x), x_row, static_cast<const decltype(of_weight) *>(weight), eps,
                      rows, width, static_cast<Value *>(output));
        });
    });
}

void layer_norm(const void *x, long type, const void *weight, const void *bias, long weight_type, float eps, long rows,
                long width, void *output) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_type(weight_type, [&](auto of_weight) {
            using Weight = decltype(of_weight);
            layer_norm_rows(static_cast<const Value *>(x), static_cast<const Weight *>(weight),
                            static_cast<const Weight *>(bias), eps, rows, width, static_cast<Value *>(output));
        });
    });
}

void relu(void *values, long type, long count) {
    with_type(type, [&](auto sample) { relu_all(static_cast<decltype(sample) *>(values), count); });
}

void gate(const void *gate_up, long type, long rows, long width, long is_gelu, void *output) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        const auto run = is_gelu ? gate_rows<Gelu, Value> : gate_rows<Silu, Value>;
        run(static_cast<const Value *>(gate_up), rows, width, static_cast<Value *>(output));
    });
}

void clamped_gate(const void *gate_up, long type, long rows, long width, float sharpness, float limit, void *output) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        clamped_gate_rows(static_cast<const Value *>(gate_up), rows, width, sharpness, limit,
                          static_cast<Value *>(output));
    });
}

void norm_heads(void *heads, long type, long heads_row, long rows, long count, long dim, const void *weight,
                long weight_type, float eps) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        with_type(weight_type, [&](auto of_weight) {
            const auto *const weights = static_cast<const decltype(of_weight) *>(weight);
#pragma omp parallel for if (rows * count * dim >= PARALLEL_FROM)
            for (long row = 0; row < rows; ++row)
                for (long head = 0; head < count; ++head) {
                    Value *const own = static_cast<Value *>(heads) + row * heads_row + head * dim;
                    norm_row(own, weights + head * dim, eps, dim, own);
                }
        });
    });
}

void add(void *to, long type, const void *from, long count) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        add_all(static_cast<Value *>(to), static_cast<const Value *>(from), count);
    });
}

void take_columns(const void *x, long type, long rows, long width, const int32_t *order, long count, float *output) {
    with_type(type, [&](auto sample) {
        const auto *const from = static_cast<const decltype(sample) *>(x);
#pragma omp parallel for if (rows * count >= PARALLEL_FROM)
        for (long row = 0; row < rows; ++row)
            for (long at = 0; at < count; ++at) output[row * count + at] = from[row * width + order[at]];
    });
}

void convert_values(const void *from, long from_type, long count, void *to, long to_type) {
    with_type(from_type, [&](auto sample) {
        using From = decltype(sample);
        with_type(to_type, [&](auto wanted) {
            using To = decltype(wanted);
            convert_all(static_cast<const From *>(from), count, static_cast<To *>(to));
        });
    });
}
}

REPEATS(attend_paged);
REPEATS(turn_and_store);
REPEATS(store_heads);
REPEATS(turn_latents);
REPEATS(rms_norm);
REPEATS(layer_norm);
REPEATS(relu);
REPEATS(norm_heads);
REPEATS(gate);
REPEATS(clamped_gate);
REPEATS(add);
REPEATS(take_columns);
REPEATS(convert_values);
