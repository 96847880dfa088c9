// Sums over the processes of one host, through memory that they share. `exchange.py` documents the arguments.
//
// A value goes through a buffer of its rank, a piece at a time. Turns take two buffers alternately: a rank has read
// what others wrote in one turn before it announces the next, so once all have announced that, the turn after it may
// overwrite what was read.

#include <atomic>
#include <cerrno>
#include <climits>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "replay.h"
#include "vectors.h"

namespace {

// A rank's last turn, and how many others sleep until it has another.
struct alignas(64) Turn {
    std::atomic<uint32_t> number, sleepers;
};
static_assert(sizeof(Turn) == 64 && std::atomic<uint32_t>::is_always_lock_free);

// What a process knows of the exchange. Ranks that wait do so on their cores for a while, since others are mostly
// late by little; they leave them to other threads that are ready to run.
struct Exchange {
    char *memory;
    int64_t descriptor, rank, ranks, piece_bytes, limit_s, turn;
    // 1 + the rank that was lost, or took too long; then what is found is void, and no call does anything.
    int64_t missing;

    Turn &turn_of(long other) const { return reinterpret_cast<Turn *>(memory)[other]; }
    char *buffer(long other) const {
        return memory + ranks * sizeof(Turn) + ((turn & 1) * ranks + other) * piece_bytes;
    }
};

constexpr int SPINS = 2000, SPINS_BETWEEN_LOOKS = 100;
constexpr long ON_CORE_NS = 1000000, ASLEEP_NS = 20000000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Whether a rank lives: the kernel drops its lock with its process.
bool lives(const Exchange &own, long other) {
    struct flock lock = {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = other, lock.l_len = 1;
    return fcntl(own.descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool reached(const Turn &other, uint32_t number, std::memory_order order = std::memory_order_acquire) {
    return static_cast<int32_t>(other.number.load(order) - number) >= 0;
}

bool sleep_until(Exchange &own, long rank, uint32_t number) {
    Turn &other = own.turn_of(rank);
    const int64_t until = now_ns() + own.limit_s * 1000000000LL;
    other.sleepers.fetch_add(1);
    bool found = false;
    while (!own.missing && !(found = reached(other, number, std::memory_order_seq_cst))) {
        const uint32_t seen = other.number.load();
        if (static_cast<int32_t>(seen - number) >= 0) continue;
        const timespec limit = {0, ASLEEP_NS};
        const long ended = syscall(SYS_futex, &other.number, FUTEX_WAIT, seen, &limit, nullptr, 0);
        const bool overslept = ended != 0 && errno == ETIMEDOUT;
        if (overslept && !reached(other, number) && (!lives(own, rank) || now_ns() > until)) own.missing = 1 + rank;
    }
    other.sleepers.fetch_sub(1);
    return found;
}

// Waits until a rank has had this turn; false if it is missing.
bool await(Exchange &own, long rank, uint32_t number) {
    const Turn &other = own.turn_of(rank);
    for (int spin = 0; spin < SPINS; ++spin) {
        if (reached(other, number)) return true;
        pause();
    }
    for (const int64_t until = now_ns() + ON_CORE_NS; now_ns() < until;) {
        sched_yield();
        for (int spin = 0; spin < SPINS_BETWEEN_LOOKS; ++spin) {
            if (reached(other, number)) return true;
            pause();
        }
    }
    return sleep_until(own, rank, number);
}

bool await_all(Exchange &own, uint32_t number) {
    for (long other = 0; other < own.ranks; ++other)
        if (other != own.rank && !await(own, other, number)) return false;
    return true;
}

// Has the others know that this rank's buffer of this turn is written.
void announce(Exchange &own) {
    Turn &turn = own.turn_of(own.rank);
    turn.number.store(static_cast<uint32_t>(own.turn));
    if (turn.sleepers.load() != 0) syscall(SYS_futex, &turn.number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Begins a turn and announces so many bytes; false if a rank is missing.
bool write_piece(Exchange &own, const char *from, long bytes) {
    if (own.missing) return false;
    ++own.turn;
    if (!await_all(own, static_cast<uint32_t>(own.turn - 1))) return false;
    std::memcpy(own.buffer(own.rank), from, bytes);
    announce(own);
    return true;
}

template <typename Value> void sum_piece(const Exchange &own, Value *values, long count) {
    const auto of = [&](long rank) { return reinterpret_cast<const Value *>(own.buffer(rank)); };
    long at = 0;
    for (; at + LANES <= count; at += LANES) {
        Floats sum = load(of(0) + at);
        for (long rank = 1; rank < own.ranks; ++rank) sum += load(of(rank) + at);
        store(values + at, sum);
    }
    for (; at < count; ++at) {
        float sum = of(0)[at];
        for (long rank = 1; rank < own.ranks; ++rank) sum += of(rank)[at];
        values[at] = sum;
    }
}

} // namespace

extern "C" {

long turn_bytes() { return sizeof(Turn); }

// Takes the lock by which others see that this rank lives; 0: another process has it.
int attend_exchange(const Exchange *own) {
    struct flock lock = {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = own->rank, lock.l_len = 1;
    return fcntl(own->descriptor, F_OFD_SETLK, &lock) == 0;
}

void sum_over_ranks(Exchange *own, void *values, long type, long count) {
    with_type(type, [&](auto sample) {
        using Value = decltype(sample);
        const long most = own->piece_bytes / sizeof(Value);
        for (long at = 0; at < count; at += most) {
            Value *const piece = static_cast<Value *>(values) + at;
            const long here = std::min(most, count - at);
            if (!write_piece(*own, reinterpret_cast<const char *>(piece), here * sizeof(Value)) ||
                !await_all(*own, static_cast<uint32_t>(own->turn)))
                return;
            sum_piece(*own, piece, here);
        }
    });
}

void gather_columns(Exchange *own, const void *values, long rows, long row_bytes, void *output) {
    const long bytes = rows * row_bytes, most = own->piece_bytes;
    for (long at = 0; at < bytes; at += most) {
        const long here = std::min(most, bytes - at);
        if (!write_piece(*own, static_cast<const char *>(values) + at, here)) return;
        if (own->rank != 0) continue;
        for (long rank = 0; rank < own->ranks; ++rank) {
            if (rank != 0 && !await(*own, rank, static_cast<uint32_t>(own->turn))) return;
            for (long done = 0; done < here;) {
                const long row = (at + done) / row_bytes, column = (at + done) % row_bytes;
                const long run = std::min(row_bytes - column, here - done);
                std::memcpy(static_cast<char *>(output) + (row * own->ranks + rank) * row_bytes + column,
                            own->buffer(rank) + done, run);
                done += run;
            }
        }
    }
}
}

REPEATS(sum_over_ranks);
REPEATS(gather_columns);
