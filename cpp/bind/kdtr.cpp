// kdtree_engine._native.kdtr: the C++ reader and writer of KDTR files, for tests and tools. The product's
// Python reads and writes these files itself (kdtree_engine/kdtr.py).
#include "core/kdtr.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "core/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kdt {

namespace {

std::span<const std::byte> span_of(const nb::bytes& bytes) {
    return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

// "ok", or the code of the rule that fails.
template <class Open>
std::string verdict(const Open& open, bool checksums) {
    try {
        const KdtrFile file = open();
        if (checksums) file.verify_checksums();
        return "ok";
    } catch (const KdtrError& error) {
        return error.rule();
    }
}

nb::list load(const std::string& path) {
    const KdtrFile file = KdtrFile::open(path);
    file.verify_checksums();
    nb::list result;
    for (size_t i = 0; i < file.names().size(); ++i) {
        const std::string name(file.names()[i]);
        const TensorView* view = file.find(name);
        if (view != &file.tensors()[i])
            fail(ErrorCode::internal, "find('%s') misses its tensor", name.c_str());
        nb::list shape;
        for (int64_t dim : view->shape) shape.append(dim);
        result.append(nb::make_tuple(name, dtype_name(view->dtype), nb::tuple(shape),
                                     nb::bytes(view->data, view->bytes)));
    }
    return result;
}

void write(const std::string& path, const nb::list& tensors) {
    std::vector<std::string> names;
    std::vector<NamedTensor> named;
    names.reserve(nb::len(tensors));  // the views below point into it
    for (nb::handle item : tensors) {
        const auto entry = nb::cast<nb::tuple>(item);
        names.push_back(nb::cast<std::string>(entry[0]));
        const auto data = nb::cast<nb::bytes>(entry[3]);
        TensorView view;
        view.dtype = static_cast<DType>(nb::cast<uint8_t>(entry[1]));
        view.shape = nb::cast<std::vector<int64_t>>(entry[2]);
        view.data = data.data();  // kept alive by the list
        view.bytes = data.size();
        named.push_back({names.back(), view});
    }
    write_kdtr(path, named);
}

}  // namespace

void bind_kdtr(nb::module_& parent) {
    nb::module_ m =
        parent.def_submodule("kdtr", "The C++ reader and writer of KDTR files, for tests and tools");
    m.def(
        "check",
        [](const std::string& path, bool checksums) {
            return verdict([&] { return KdtrFile::open(path); }, checksums);
        },
        "path"_a, "checksums"_a = true,
        "'ok', or the code of the first rule that the file at `path` breaks.");
    m.def(
        "check_bytes",
        [](const nb::bytes& bytes, bool checksums) {
            return verdict([&] { return KdtrFile::parse(span_of(bytes), "<memory>"); }, checksums);
        },
        "data"_a, "checksums"_a = true,
        "'ok', or the code of the first rule that a file of these bytes breaks.");
    m.def("load", &load, "path"_a,
          "All tensors of a file in its order: (name, dtype name, shape, data). Raises Error.");
    m.def("write", &write, "path"_a, "tensors"_a,
          "Writes tensors given as (name, dtype number, shape, data as bytes). Raises Error.");
    m.def(
        "crc32c", [](const nb::bytes& bytes) { return crc32c(bytes.data(), bytes.size()); }, "data"_a,
        "CRC-32C of the bytes.");
}

}  // namespace kdt
