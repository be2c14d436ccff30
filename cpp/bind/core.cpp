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

    m.def(
        "gpu_report",
        [] {
            const GpuReport report = gpu_report();
            nb::list gpus;
            for (const GpuReport::Gpu& gpu : report.gpus) {
                nb::dict d;
                d["name"] = gpu.name;
                d["compute_capability"] = format("%d.%d", gpu.major, gpu.minor);
                d["multiprocessors"] = gpu.multiprocessors;
                d["memory"] = gpu.memory;
                d["compiled_for"] = gpu.compiled_for;
                gpus.append(d);
            }
            const auto version = [](int v) {
                return v == 0 ? std::string("none") : format("%d.%d", v / 1000, v % 1000 / 10);
            };
            nb::dict info;
            info["driver"] = version(report.driver);
            info["runtime"] = version(report.runtime);
            info["architectures"] = report.architectures;
            info["problem"] = report.problem;
            info["gpus"] = gpus;
            return info;
        },
        "What the CUDA backend finds here: driver and runtime (CUDA versions), compiled architectures, GPUs, "
        "or the problem.");
}

}  // namespace kdt
