// Mixtures of experts beside their products (products.cpp): which experts a token uses, the rows that each expert
// computes, and their weighted sums. `experts.py` documents the arguments.

#include "replay.h"
#include "vectors.h"

#include <cmath>
#include <vector>

namespace {

constexpr long PARALLEL_FROM = 1 << 15; // values; with fewer, waking a thread takes longer than it saves
constexpr float LEAST = 1e-20f;         // added to a sum of weights before they are divided by it

// The greatest of values that are not taken, the first of equal ones.
long greatest(const float *values, const char *taken, long count) {
    long best = -1;
    for (long at = 0; at < count; ++at)
        if (!taken[at] && (best < 0 || values[at] > values[best])) best = at;
    return best;
}

struct Routing {
    long experts, chosen, is_sigmoid, renormalises;
    float factor;
    long groups, kept, best;
    const float *bias;

    // Logits become scores, which add up to one or lie between zero and one.
    template <typename Value> void score(const Value *logits, float *scores) const {
        float most = -INFINITY, total = 0;
        for (long at = 0; at < experts; ++at) most = std::max(most, scores[at] = logits[at]);
        for (long at = 0; at < experts; ++at) {
            scores[at] = is_sigmoid ? 1 / (1 + std::exp(-scores[at])) : std::exp(scores[at] - most);
            total += scores[at];
        }
        if (!is_sigmoid)
            for (long at = 0; at < experts; ++at) scores[at] /= total;
    }

    // Takes all experts outside the groups whose `best` ones rank highest.
    void leave_out(const float *ranks, char *taken) const {
        const long size = experts / groups;
        std::vector<float> sums(groups);
        for (long group = 0; group < groups; ++group) {
            std::vector<char> counted(size);
            for (long number = 0; number < best; ++number) {
                const long at = greatest(ranks + group * size, counted.data(), size);
                counted[at] = 1;
                sums[group] += ranks[group * size + at];
            }
        }
        std::vector<char> in(groups);
        for (long number = 0; number < kept; ++number) in[greatest(sums.data(), in.data(), groups)] = 1;
        for (long at = 0; at < experts; ++at) taken[at] = !in[at / size];
    }

    template <typename Value> void run(const Value *logits, float *weights, int64_t *numbers) const {
        std::vector<float> scores(experts), ranks(experts);
        std::vector<char> taken(experts);
        score(logits, scores.data());
        for (long at = 0; at < experts; ++at) ranks[at] = scores[at] + (bias ? bias[at] : 0);
        if (groups > 1) leave_out(ranks.data(), taken.data());
        float total = 0;
        for (long number = 0; number < chosen; ++number) {
            const long found = std::max(0L, greatest(ranks.data(), taken.data(), experts));
            taken[found] = 1;
            numbers[number] = found;
            total += weights[number] = scores[found];
        }
        const float scale = renormalises ? factor / (total + LEAST) : factor;
        for (long number = 0; number < chosen; ++number) weights[number] *= scale;
    }
};

template <typename Value>
void add_rows(const Value *rows, const int64_t *places, const float *weights, long tokens, long per_token, long width,
              Value *output) {
    const long whole = width / LANES * LANES;
#pragma omp parallel for if (tokens * per_token * width >= PARALLEL_FROM)
    for (long token = 0; token < tokens; ++token) {
        const int64_t *const own = places + token * per_token;
        const float *const share = weights + token * per_token;
        Value *const to = output + token * width;
        for (long at = 0; at < whole; at += LANES) {
            Floats sums = {};
            for (long number = 0; number < per_token; ++number)
                if (own[number] >= 0) sums += share[number] * load(rows + own[number] * width + at);
            store(to + at, sums);
        }
        for (long at = whole; at < width; ++at) {
            float sum = 0;
            for (long number = 0; number < per_token; ++number)
                if (own[number] >= 0) sum += share[number] * static_cast<float>(rows[own[number] * width + at]);
            to[at] = sum;
        }
    }
}

} // namespace

extern "C" {

void choose_experts(const void *logits, long type, long tokens, long experts, long chosen, long is_sigmoid,
                    long renormalises, float factor, long groups, long kept, long best, const float *bias,
                    float *weights, int64_t *numbers) {
    const Routing routing{experts, chosen, is_sigmoid, renormalises, factor, groups, kept, best, bias};
    with_type(type, [&](auto sample) {
        const auto *const each = static_cast<const decltype(sample) *>(logits);
#pragma omp parallel for if (tokens * experts >= PARALLEL_FROM / 8)
        for (long token = 0; token < tokens; ++token)
            routing.run(each + token * experts, weights + token * chosen, numbers + token * chosen);
    });
}

void gather_experts(const int64_t *numbers, long pairs, long per_token, long first, long held, const char *x,
                    long row_bytes, int64_t *counts, int64_t *places, char *rows) {
    std::fill(counts, counts + held, 0);
    for (long pair = 0; pair < pairs; ++pair)
        if (const long expert = numbers[pair] - first; expert >= 0 && expert < held) ++counts[expert];
    std::vector<int64_t> next(held);
    for (long expert = 1; expert < held; ++expert) next[expert] = next[expert - 1] + counts[expert - 1];
    for (long pair = 0; pair < pairs; ++pair) {
        const long expert = numbers[pair] - first;
        places[pair] = expert >= 0 && expert < held ? next[expert]++ : -1;
    }
#pragma omp parallel for if (pairs * row_bytes >= 4 * PARALLEL_FROM)
    for (long pair = 0; pair < pairs; ++pair)
        if (places[pair] >= 0)
            std::memcpy(rows + places[pair] * row_bytes, x + pair / per_token * row_bytes, row_bytes);
}

void add_experts(const void *rows, long type, const int64_t *places, const float *weights, long tokens, long per_token,
                 long width, void *output) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        add_rows(static_cast<const Value *>(rows), places, weights, tokens, per_token, width,
                 static_cast<Value *>(output));
    });
}
}

REPEATS(choose_experts);
REPEATS(gather_experts);
REPEATS(add_experts);
