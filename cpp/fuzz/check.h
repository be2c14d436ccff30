// A property that must hold in a fuzz target: libFuzzer keeps the input that breaks it.
#pragma once

#include <cstdio>
#include <cstdlib>

#define KDT_FUZZ_CHECK(holds)                                                          \
    do {                                                                               \
        if (!(holds)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #holds); \
            std::abort();                                                              \
        }                                                                              \
    } while (0)
