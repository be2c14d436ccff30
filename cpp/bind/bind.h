// Registration functions of the binding, one per area.
#pragma once

#include <nanobind/nanobind.h>

namespace kdt {

void bind_core(nanobind::module_& m);       // Error, build_info
void bind_kdtr(nanobind::module_& m);       // kdtr: the C++ reader's verdict, for tests and tools
void bind_ops(nanobind::module_& m);        // ops: each kernel on numpy arrays
void bind_round_ops(nanobind::module_& m);  // from select to commit, in ops
void bind_draft_ops(nanobind::module_& m);  // those of the draft model, in ops
void bind_draft(nanobind::module_& m);      // drafters, the draft model's loader, the budget
void bind_engine(nanobind::module_& m);     // EngineBuilder, Engine, Executor, Session

}  // namespace kdt
