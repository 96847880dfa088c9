// All kernels of a step in one call, with the arguments of a step before: what they read that differs from step to
// step is where it was then.

#include "replay.h"

#include <map>
#include <string>

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

void replay(const Call *calls, long count) {
    for (long number = 0; number < count; ++number) calls[number].repeat(calls[number].arguments);
}
}
