// Kernels that can be called again with arguments that were kept (replay.cpp).

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

union Argument {
    void *address;
    int64_t whole;
    double real;
};

typedef void Repeat(const Argument *);

// Has `find_repeat` know a kernel.
bool add_repeat(const char *name, Repeat *repeat);

template <typename Type> Type as(const Argument &argument) {
    if constexpr (std::is_pointer_v<Type>)
        return static_cast<Type>(argument.address);
    else if constexpr (std::is_floating_point_v<Type>)
        return static_cast<Type>(argument.real);
    else
        return static_cast<Type>(argument.whole);
}

template <auto KERNEL> struct Repeated;

template <typename... Types, void (*KERNEL)(Types...)> struct Repeated<KERNEL> {
    static void run(const Argument *arguments) { unpacked(arguments, std::index_sequence_for<Types...>{}); }

    template <size_t... N> static void unpacked(const Argument *arguments, std::index_sequence<N...>) {
        KERNEL(as<Types>(arguments[N])...);
    }
};

#define REPEATS(kernel) [[maybe_unused]] static const bool repeats_##kernel = add_repeat(#kernel, Repeated<kernel>::run)
