// Products with weights in panels, in float32 and in 16 bits, as fast as memory allows for few rows.
// `products.py` documents the arguments. All arrays are row-major; sizes are counts of values.

#include "products.h"
#include "replay.h"

#include <atomic>
#include <memory>

// GCC 10 came with an assembler that knows products of pairs.
#if (defined(__AVX512F__) || defined(__aarch64__)) && __GNUC__ >= 10
#define HAS_DOTS 1
#endif

namespace {

constexpr long AHEAD = LANES == 16 ? 64 : 256; // words of a panel between what is prefetched and what is used
constexpr long LAID_BYTES = 1 << 20;   // of x that a thread lays out at a time
constexpr long LAID_GROUPS = 10;       // of rows, at least, if there are so many: fewer read the weights too often
constexpr long LAID_PANELS = 8;        // that they are multiplied by, for which it pays

// How words of 32 bits, of which a panel has [words, PANEL], are multiplied. Value is the type of x and of the
// results, Input that of x as `add` reads it, STEP how many of these belong to a word, FEW how many rows gain by
// several panels at once, MOST_ROWS how many pass one together; `add` adds the products of ROWS rows, x_row apart,
// whose inputs are x_next apart, with PANEL words.

// A word is a float.
struct Singles {
    typedef float Value;
    typedef float Input;
    static constexpr long INPUTS = 1, STEP = 1, FEW = 3, MOST_ROWS = PRODUCT_ROWS;
    template <int ROWS>
    static inline void add(const float *x, long x_row, long, const Floats *words, Floats (*sums)[PANEL_VECTORS]) {
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part) sums[row][part] += x[row * x_row] * words[part];
    }
};

// A word is two weights of 16 bits for neighbouring inputs, the first one in its lower half. They become floats, for
// which registers must be left.
template <typename Of, typename Weight> struct Halves {
    typedef Of Value;
    typedef float Input;
    static constexpr long INPUTS = 2, STEP = 2, FEW = 2, MOST_ROWS = FEWER_ROWS;
    template <int ROWS>
    static inline void add(const float *x, long x_row, long x_next, const Floats *words,
                           Floats (*sums)[PANEL_VECTORS]) {
        for (int half = 0; half < 2; ++half) {
            Floats weights[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; ++part)
                weights[part] = Weight::widened(as_bits(words[part]), half);
            for (int row = 0; row < ROWS; ++row)
                for (int part = 0; part < PANEL_VECTORS; ++part)
                    sums[row][part] += x[row * x_row + half * x_next] * weights[part];
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
    static constexpr long INPUTS = 2, STEP = 1, FEW = LANES == 16 ? 2 : 1, MOST_ROWS = PRODUCT_ROWS;
    template <int ROWS>
    static inline void add([[maybe_unused]] const int32_t *x, [[maybe_unused]] long x_row, long,
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
// places at a time; processors then fetch ahead by themselves, and lose time if they are told to. Measured with AVX2
// and AVX-512.
template <typename Kind> constexpr int at_once(long rows) {
    return LANES < 8 || rows > Kind::FEW ? 1 : rows == 1 && LANES == 16 ? 4 : 6 / rows;
}

// Whether numbers of x take another form before they are multiplied.
template <typename Kind>
constexpr bool CONVERTS = sizeof(typename Kind::Input) * Kind::STEP > sizeof(typename Kind::Value) * Kind::INPUTS;

// BESIDE: the first inputs of all rows lie beside each other, then the second ones, and so on.
template <typename Kind, bool BESIDE = false> struct Product {
    // ROWS rows of x, x_row apart, times one panel; `ahead` is prefetched meanwhile. Every row is summed in the same
    // order whatever ROWS is, so a token's result does not depend on its batch.
    template <int ROWS>
    static void multiply(const typename Kind::Input *x, long x_row, long words, const float *panel,
                         const float *bias, Ahead ahead, typename Kind::Value *output, long output_row,
                         long width) {
        const long row_step = BESIDE ? 1 : x_row, step = BESIDE ? ROWS : 1;
        Floats result[ROWS][PANEL_VECTORS];
        for (int row = 0; row < ROWS; ++row)
            for (int part = 0; part < PANEL_VECTORS; ++part)
                result[row][part] = bias ? load(bias + part * LANES) : Floats{};
        for (long at = 0; at < words; ++at, panel += PANEL, ahead.at += ahead.step, x += Kind::STEP * step) {
            Floats weights[PANEL_VECTORS];
            for (int part = 0; part < PANEL_VECTORS; ++part) {
                weights[part] = load(panel + part * LANES);
                __builtin_prefetch(ahead.at + part * sizeof(Floats), 0, 2);
            }
            Kind::template add<ROWS>(x, row_step, step, weights, result);
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
    static void multiply(const typename Kind::Input *x, long x_row, long words, const float *panel,
                         const float *bias, typename Kind::Value *output, long output_row, long width) {
        constexpr int COUNT = at_once<Kind>(ROWS);
        const long size = words * PANEL;
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
                Kind::template add<ROWS>(x, x_row, 1, weights, result[next]);
            }
        for (int next = 0; next < COUNT; ++next)
            Product<Kind>::template write<ROWS>(result[next], output + next * PANEL, output_row,
                                                next + 1 < COUNT ? PANEL : width);
    }
};

// Rows of x and the matrix that they are multiplied with; rows of x and of the output are so far apart.
template <typename Kind> struct Batch {
    const typename Kind::Value *x;
    long x_row, rows;
    const float *packed, *bias; // or no bias
    typename Kind::Value *output;
    long output_row;
};

// What one thread does at a time: rows of a batch, which it lays out or not, with some of the panels.
struct Task {
    long batch, row, end_row, first_panel, end_panel;
    bool lays_out;
};

// How all batches are shared by threads. Rows that are many are laid out, so that a kernel reads them one after the
// other: far apart, they compete for the same lines of the L1 cache. Each thread does so for itself, since caches
// of two cores take longer to agree on what one writes and the other reads.
template <typename Kind>
std::vector<Task> tasks_of(const std::vector<Batch<Kind>> &batches, long words, long panels) {
    const long threads = omp_get_max_threads(), row_bytes = words * Kind::STEP * sizeof(typename Kind::Input);
    std::vector<long> blocks;
    long all = 0;
    for (const auto &batch : batches) {
        const long by_size = (batch.rows * row_bytes + LAID_BYTES - 1) / LAID_BYTES;
        const long most = std::max(1L, batch.rows / (LAID_GROUPS * Kind::MOST_ROWS));
        blocks.push_back(batch.rows > Kind::MOST_ROWS ? std::min(most, std::max(by_size, threads)) : 0);
        all += blocks.back();
    }
    const bool lay_out = panels * std::min(all, threads) >= LAID_PANELS * threads;
    std::vector<Task> tasks;
    for (long at = 0; at < static_cast<long>(batches.size()); ++at) {
        const long rows = batches[at].rows, groups = (rows + Kind::MOST_ROWS - 1) / Kind::MOST_ROWS;
        const bool lays_out = lay_out && blocks[at];
        const long parts = lays_out ? blocks[at] : rows > 0;
        const long shared = std::min(panels, (PIECES * threads + all - 1) / std::max(1L, all));
        const long pieces = lays_out ? shared : count_pieces(panels, rows);
        for (long part = 0; part < parts; ++part)
            for (long piece = 0; piece < pieces; ++piece)
                tasks.push_back({at, rows * (groups * part / parts) / groups,
                                 rows * (groups * (part + 1) / parts) / groups, panels * piece / pieces,
                                 panels * (piece + 1) / pieces, lays_out});
    }
    return tasks;
}

// Rows of x that a thread has laid out: those of each group, as `for_panels` makes them, with their first inputs beside
// each other, then the second ones.
template <typename Kind> class LaidOut {
    typedef typename Kind::Value Value;
    typedef typename Kind::Input Input;

  public:
    const Input *of(const Task &task, const Batch<Kind> &batch, long words) {
        if (task.batch == batch_ && task.row == row_) return values_.get();
        batch_ = task.batch, row_ = task.row;
        const long rows = task.end_row - task.row, groups = (rows + Kind::MOST_ROWS - 1) / Kind::MOST_ROWS;
        const long width = words * Kind::STEP;
        if (rows * width > size_) values_.reset(new Input[size_ = rows * width]);
        for (long group = 0; group < groups; ++group) {
            const long row = rows * group / groups, count = rows * (group + 1) / groups - row;
            lay_out(batch.x + (task.row + row) * batch.x_row, batch.x_row, count, width, &values_[row * width]);
        }
        return values_.get();
    }

    // Forgets which rows are laid out, and keeps the memory.
    void forget() { batch_ = row_ = -1; }

  private:
    static void lay_out(const Value *x, long x_row, long rows, long width, Input *to) {
        constexpr long VALUES = CONVERTS<Kind> ? 1 : sizeof(Input) / sizeof(Value); // in an Input
        const auto read = [&](long row, long at, auto &found) {
            const Value *const from = x + row * x_row + at * VALUES;
            if constexpr (CONVERTS<Kind>) {
                Input values[sizeof found / sizeof(Input)];
                std::copy(from, from + sizeof found / sizeof(Input), values);
                std::memcpy(&found, values, sizeof found);
            } else
                std::memcpy(&found, from, sizeof found);
        };
        lay_beside(rows, width, read, to);
    }

    std::unique_ptr<Input[]> values_;
    long size_ = 0, batch_ = -1, row_ = -1;
};

// The rows of a task, laid out, times its panels.
template <typename Kind>
void multiply_laid_out(const typename Kind::Input *x, const Task &task, const Batch<Kind> &batch, long words,
                       long outputs) {
    const long size = words * PANEL, width = words * Kind::STEP;
    typename Kind::Value *const output = batch.output + task.row * batch.output_row;
    const auto multiply = [&](long panel, long from, long to, const Ahead &ahead) {
        multiplies<Product<Kind, true>>.by_rows[to - from](
            x + from * width, 0, words, batch.packed + panel * size, batch.bias ? batch.bias + panel * PANEL : nullptr,
            ahead, output + from * batch.output_row + panel * PANEL, batch.output_row,
            std::min<long>(PANEL, outputs - panel * PANEL));
    };
    for_panels<Kind::MOST_ROWS>(task.end_row - task.row, batch.packed, size, AHEAD * PANEL, task.first_panel,
                                task.end_panel, multiply);
}

// All rows of a batch times the panels of a task, from where they are.
template <typename Kind>
void multiply_in_place(const Task &task, const Batch<Kind> &batch, long words, long outputs) {
    typedef typename Kind::Input Input;
    const long inputs = words * Kind::INPUTS, size = words * PANEL;
    const long x_row = CONVERTS<Kind> ? words * Kind::STEP : batch.x_row / Kind::INPUTS * Kind::STEP;
    const long block = block_of(words * Kind::STEP * sizeof(Input), Kind::MOST_ROWS);
    std::vector<float> converted(CONVERTS<Kind> ? std::min(block, batch.rows) * inputs : 0);
    for (long first = 0; first < batch.rows; first += block) {
        const long count = std::min(block, batch.rows - first);
        const typename Kind::Value *const own = batch.x + first * batch.x_row;
        const Input *some = reinterpret_cast<const Input *>(own);
        if constexpr (CONVERTS<Kind>) {
            for (long row = 0; row < count; ++row) convert(own + row * batch.x_row, inputs, &converted[row * inputs]);
            some = converted.data();
        }
        const auto width_of = [&](long panel) { return std::min<long>(PANEL, outputs - panel * PANEL); };
        const auto bias_of = [&](long panel) { return batch.bias ? batch.bias + panel * PANEL : nullptr; };
        typename Kind::Value *const output = batch.output + first * batch.output_row;
        long panel = task.first_panel;
        if (const long several = at_once<Kind>(count); several > 1)
            for (; panel + several <= task.end_panel; panel += several)
                multiplies<Several<Kind>, Kind::FEW>.by_rows[count](
                    some, x_row, words, batch.packed + panel * size, bias_of(panel), output + panel * PANEL,
                    batch.output_row, width_of(panel + several - 1));
        const auto multiply = [&](long panel, long from, long to, const Ahead &ahead) {
            multiplies<Product<Kind>>.by_rows[to - from](
                some + from * x_row, x_row, words, batch.packed + panel * size, bias_of(panel), ahead,
                output + from * batch.output_row + panel * PANEL, batch.output_row, width_of(panel));
        };
        for_panels<Kind::MOST_ROWS>(count, batch.packed, size, AHEAD * PANEL, panel, task.end_panel, multiply);
    }
}

// The next task of a share, in a line of the cache of its own.
struct alignas(64) Next {
    std::atomic<long> task;
};

// The products of all batches. Each thread begins with a share of its own, in which it finds what it has laid out, and
// goes on with what is left of the others'.
template <typename Kind>
void multiply_batches(const std::vector<Batch<Kind>> &batches, long inputs, long outputs) {
    const long words = inputs / Kind::INPUTS;
    const std::vector<Task> tasks = tasks_of<Kind>(batches, words, (outputs + PANEL - 1) / PANEL);
    const long count = tasks.size(), shares = omp_get_max_threads();
    std::vector<Next> next(shares);
    for (long share = 0; share < shares; ++share) next[share].task = count * share / shares;
#pragma omp parallel
    {
        static thread_local LaidOut<Kind> laid_out;
        laid_out.forget();
        for (long turn = 0; turn < shares; ++turn) {
            const long share = (omp_get_thread_num() + turn) % shares;
            for (long at; (at = next[share].task++) < count * (share + 1) / shares;) {
                const Task &task = tasks[at];
                const Batch<Kind> &batch = batches[task.batch];
                if (task.lays_out)
                    multiply_laid_out<Kind>(laid_out.of(task, batch, words), task, batch, words, outputs);
                else
                    multiply_in_place<Kind>(task, batch, words, outputs);
            }
        }
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
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        const Batch<Kind> all{static_cast<const Value *>(x), inputs, rows, packed, bias, static_cast<Value *>(output),
                              outputs};
        multiply_batches<Kind>({all}, inputs, outputs);
    });
}

void multiply_heads(const void *x, long x_row, long x_head, long rows, long heads, long inputs, long kind,
                    const float *packed, long outputs, void *output, long output_row, long output_head) {
    const long panels = (outputs + PANEL - 1) / PANEL;
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        const long size = panels * (inputs / Kind::INPUTS) * PANEL;
        std::vector<Batch<Kind>> batches;
        for (long head = 0; head < heads; ++head)
            batches.push_back({static_cast<const Value *>(x) + head * x_head, x_row, rows, packed + head * size,
                               nullptr, static_cast<Value *>(output) + head * output_head, output_row});
        multiply_batches<Kind>(batches, inputs, outputs);
    });
}

void multiply_grouped(const void *x, const int64_t *counts, long groups, long inputs, long kind,
                      const float *const *packed, const float *const *biases, long outputs, void *output) {
    with_kind(kind, [&](auto chosen) {
        using Kind = decltype(chosen);
        typedef typename Kind::Value Value;
        const Value *from = static_cast<const Value *>(x);
        Value *to = static_cast<Value *>(output);
        std::vector<Batch<Kind>> batches;
        for (long group = 0; group < groups; from += counts[group] * inputs, to += counts[group++] * outputs)
            batches.push_back(
                {from, inputs, counts[group], packed[group], biases ? biases[group] : nullptr, to, outputs});
        multiply_batches<Kind>(batches, inputs, outputs);
    });
}
}

REPEATS(multiply_packed);
REPEATS(multiply_heads);
REPEATS(multiply_grouped);
