// What the bindings of ops share: array types, outputs, one backend per setting, the arguments of every op.
#pragma once

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "backend/cpu/cpu_backend.h"
#include "bind/bind.h"
#include "core/error.h"

namespace kdt::ops_support {

namespace nb = nanobind;
using namespace nb::literals;

template <class T, int N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using InOut = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T>;

template <class T>
Out<T> make(std::initializer_list<size_t> shape) {
    size_t count = 1;
    for (size_t n : shape) count *= n;
    T* data = new T[count == 0 ? 1 : count];
    std::memset(static_cast<void*>(data), 0xFF, count * sizeof(T));
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Out<T>(data, shape, owner);
}

template <class A>
int dim(const A& array, size_t axis) {
    if (array.shape(axis) > INT32_MAX / 2)
        fail(ErrorCode::invalid_argument, "an array with %zu entries along axis %zu", array.shape(axis),
             axis);
    return static_cast<int>(array.shape(axis));
}

inline void expect(const char* what, int64_t value, int64_t expected) {
    if (value != expected)
        fail(ErrorCode::invalid_argument, "%s is %lld; %lld was expected", what,
             static_cast<long long>(value), static_cast<long long>(expected));
}

// One backend per (threads, instruction set), for the life of the process.
inline cpu::CpuBackend& backend(int threads, const std::string& isa) {
    static auto* cache = new std::map<std::tuple<int, std::string, std::string>, std::unique_ptr<Backend>>;
    const char* environment = std::getenv("KDTREE_CPU_ISA");
    auto& slot = (*cache)[{threads, isa, environment == nullptr ? "" : environment}];
    if (!slot) slot = make_cpu_backend({threads, isa});
    return static_cast<cpu::CpuBackend&>(*slot);
}

// A matrix in the backend's layout, which is one for all instruction sets.
struct Matrix {
    explicit Matrix(const HostMatrix& host, const std::string& name) : owner({1, ""}) {
        nb::gil_scoped_release release;
        weight = owner.upload_matrix(host, name);
    }
    cpu::CpuBackend owner;
    Weight weight;
};
using MatrixPtr = std::shared_ptr<Matrix>;

struct Experts {
    Experts(std::vector<MatrixPtr> g, std::vector<MatrixPtr> u, std::vector<MatrixPtr> d)
        : owner({1, ""}), gate(std::move(g)), up(std::move(u)), down(std::move(d)) {
        const auto weights = [](const std::vector<MatrixPtr>& all) {
            std::vector<Weight> list;
            for (const MatrixPtr& m : all) list.push_back(m->weight);
            return list;
        };
        set = owner.make_experts(weights(gate), weights(up), weights(down), "experts");
    }
    cpu::CpuBackend owner;
    std::vector<MatrixPtr> gate, up, down;
    ExpertSet set;
};

// Arguments that every op takes.
struct Run {
    int threads;
    std::string isa;
    int live;
};

inline int live_of(int live, int rows) {
    return live < 0 || live > rows ? rows : live;
}

// Runs `f(backend, rows)` without the GIL.
template <class F>
void run(const Run& how, int rows, const F& f) {
    cpu::CpuBackend& b = backend(how.threads, how.isa);
    const int32_t live = how.live < 0 ? rows : how.live;
    nb::gil_scoped_release release;
    f(b, Rows{rows, &live});
}

inline RopeTable rope_table(const In<float, 2>& cos, const In<float, 2>& sin, bool interleaved) {
    expect("rows of sin", dim(sin, 0), dim(cos, 0));
    expect("columns of sin", dim(sin, 1), dim(cos, 1));
    return {cos.data(), sin.data(), 2 * dim(cos, 1), dim(cos, 0), interleaved};
}

// The arrays of a RowBatch, checked against each other.
struct Batch {
    In<int32_t, 1> sequence, position, prefix, ancestor_count;
    In<int32_t, 2> ancestors;
    RowBatch view(int rows, int live, int sequences) const {
        expect("rows of sequence", dim(sequence, 0), rows);
        expect("rows of position", dim(position, 0), rows);
        expect("rows of prefix", dim(prefix, 0), rows);
        expect("rows of ancestor_count", dim(ancestor_count, 0), rows);
        expect("rows of ancestors", dim(ancestors, 0), rows);
        expect("columns of ancestors", dim(ancestors, 1), kMaxAncestors);
        for (int i = 0; i < live_of(live, rows); ++i)
            if (sequence(i) < 0 || sequence(i) >= sequences)
                fail(ErrorCode::invalid_argument, "row %d is of sequence %d of %d", i, sequence(i),
                     sequences);
        const auto plain = [](const auto& a) { return const_cast<int32_t*>(a.data()); };
        return {nullptr,       plain(sequence),       plain(position),
                plain(prefix), plain(ancestor_count), plain(ancestors)};
    }
};

struct Cache {
    float* pages;
    float* scratch;
    In<int32_t, 2> page_table;
    int page_count, width, scratch_rows;
    LatentCache view() const { return {pages, scratch, page_table.data(), page_count, dim(page_table, 1)}; }
};
template <class Pages, class Scratch>
Cache cache_of(const Pages& pages, const Scratch& scratch, const In<int32_t, 2>& page_table) {
    expect("slots of a page", dim(pages, 1), kPageSize);
    expect("width of scratch", dim(scratch, 1), dim(pages, 2));
    return {const_cast<float*>(pages.data()),
            const_cast<float*>(scratch.data()),
            page_table,
            dim(pages, 0),
            dim(pages, 2),
            dim(scratch, 0)};
}

}  // namespace kdt::ops_support

// How the common arguments are declared and collected.
#define KDT_RUN_PARAMS int threads, std::string isa, int live
#define KDT_RUN            \
    Run {                  \
        threads, isa, live \
    }
#define KDT_RUN_ARGS "threads"_a = 1, "isa"_a = "", "live"_a = -1
#define KDT_BATCH_PARAMS                                                                                    \
    In<int32_t, 1> sequence, In<int32_t, 1> position, In<int32_t, 1> prefix, In<int32_t, 1> ancestor_count, \
        In<int32_t, 2> ancestors
#define KDT_BATCH                                             \
    Batch {                                                   \
        sequence, position, prefix, ancestor_count, ancestors \
    }
#define KDT_BATCH_ARGS                                                          \
    "sequence"_a.noconvert(), "position"_a.noconvert(), "prefix"_a.noconvert(), \
        "ancestor_count"_a.noconvert(), "ancestors"_a.noconvert()
