// The kernels compiled for the CPU, and a table to find them by name. `build.sh` writes both lists from the kernels' folder.
#include "gpu.h"

#include <map>
#include <string>

#include "common.cuh"

bf16 round_to_bf16(float x) { return {float_to_bf16(x)}; }

#include "headers.inc"

// Every file in a namespace of its own, named by its stem and `_`.
#include "sources.inc"

template <class... A, size_t... I> void apply(void (*f)(A...), void **arguments, std::index_sequence<I...>) {
    f(*(std::remove_const_t<A> *)arguments[I]...);
}
template <class... A> void apply(void (*f)(A...), void **arguments) { apply(f, arguments, std::index_sequence_for<A...>()); }
template <class... A> std::vector<size_t> sizes(void (*)(A...)) { return {sizeof(A)...}; }

std::map<std::string, Kernel> &kernels() {
#define K(space, name) {#name, Kernel{[](void **arguments) { apply(space::name, arguments); }, sizes(space::name)}},
    static std::map<std::string, Kernel> table = {
#include "kernels.inc"
    };
    return table;
}
