// All kernels of a step in one call, with the arguments of a step before: what they read that differs from step to
// step is where it was then.

#include "replay.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace {

std::map<std::string, Repeat *> &repeats() {
    static std::map<std::string, Repeat *> found;
    return found;
}

struct Call {
    Repeat *repeat;
    const Argument *arguments;
};

} // namespace

bool add_repeat(const char *name, Repeat *repeat) { return repeats().emplace(name, repeat).second; }

extern "C" {

// What repeats a kernel; null: it can't be repeated.
Repeat *find_repeat(const char *name) {
    const auto found = repeats().find(name);
    return found == repeats().end() ? nullptr : found->second;
}

// A kernel once for each group that has rows: it multiplies so many rows of x, one group's after the other's, by the
// group's matrix. `arguments` has `size` for each group: the kernel's first is x, its second how many rows there are,
// and its last where results go.
void multiply_each(const void *kernel, const Argument *arguments, long size, const int64_t *counts, long groups,
                   const float *x, long inputs, long outputs, float *output) {
    const auto run = reinterpret_cast<Repeat *>(const_cast<void *>(kernel));
    std::vector<Argument> own(size);
    for (long group = 0; group < groups; ++group) {
        if (counts[group] == 0) continue;
        std::copy_n(arguments + group * size, size, own.begin());
        own[0].address = const_cast<float *>(x);
        own[1].whole = counts[group];
        own[size - 1].address = output;
        run(own.data());
        x += counts[group] * inputs;
        output += counts[group] * outputs;
    }
}

void replay(const Call *calls, long count) {
    for (long number = 0; number < count; ++number) calls[number].repeat(calls[number].arguments);
}
}

REPEATS(multiply_each);
