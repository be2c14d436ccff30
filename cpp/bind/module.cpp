// The Python module kdtree_engine._native: one registration per area, nothing else.
#include <nanobind/nanobind.h>

#include "bind/bind.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Native core of kdtree_engine";
    kdt::bind_core(m);
    kdt::bind_kdtr(m);
    kdt::bind_ops(m);
    kdt::bind_draft(m);
    kdt::bind_engine(m);
}
