// kdtree_engine._native.Error and build_info().
#include <nanobind/stl/string.h>

#include "backend/backend.h"
#include "bind/bind.h"
#include "core/error.h"

namespace nb = nanobind;

namespace kdt {

void bind_core(nb::module_& m) {
    // A Python exception with the attribute `code` (a string of ErrorCode); the message is one sentence.
    nb::object error =
        nb::steal(PyErr_NewException("kdtree_engine._native.Error", PyExc_RuntimeError, nullptr));
    m.attr("Error") = error;
    static PyObject* error_type = error.ptr();  // the module keeps it alive
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const Error& e) {
            nb::object value = nb::steal(PyObject_CallFunction(error_type, "s", e.what()));
            if (!value.is_valid()) return;  // the failed call has set its own exception
            value.attr("code") = nb::str(error_code_name(e.code()));
            PyErr_SetObject(error_type, value.ptr());
        }
    });

    m.def(
        "build_info",
        [] {
            nb::dict info;
            info["version"] = KDT_VERSION;
            info["compiler"] = KDT_COMPILER;
            info["cuda"] = built_with_cuda();
            info["cuda_reason"] = KDT_CUDA_SUMMARY;
            return info;
        },
        "What this build holds: version, compiler, whether CUDA is in and why.");
}

}  // namespace kdt
