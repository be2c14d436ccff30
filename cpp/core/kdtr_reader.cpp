// The KDTR reader: rules 1 to 39 of docs/formats/kdtr-v1.md, in that order.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "core/checked.h"
#include "core/crc32c.h"
#include "core/kdtr_format.h"

namespace kdt {

namespace {

using namespace kdtr;

struct Descriptor {
    int fd;
    ~Descriptor() {
        if (fd >= 0) ::close(fd);
    }
};

constexpr ErrorCode kBad = ErrorCode::bad_file;

// Rules 4 to 17. Reads 64 bytes and the size of the file, nothing else.
Header check_header(std::span<const std::byte> file, const std::string& label) {
    const uint64_t size = file.size();
    if (size < sizeof(Header))
        refuse(kBad, label, "E_HEADER_SHORT", "%" PRIu64 " bytes, a header has %zu", size, sizeof(Header));
    Header h;
    std::memcpy(&h, file.data(), sizeof h);
    if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0)
        refuse(kBad, label, "E_MAGIC", "not a KDTR file: the first four bytes are not 'KDTR'");
    if (std::memcmp(h.guard, kGuard, sizeof kGuard) != 0)
        refuse(kBad, label, "E_GUARD", "guard bytes are damaged, as by a transfer in text mode");
    if (h.major != kMajor)
        refuse(kBad, label, "E_VERSION", "version %u.%u, this reader knows version %u", h.major, h.minor,
               kMajor);
    const uint32_t crc = crc32c(file.data(), kHeaderCrcAt);
    if (h.header_crc != crc)
        refuse(kBad, label, "E_HEADER_CRC", "header checksum is %08" PRIx32 ", stored is %08" PRIx32, crc,
               h.header_crc);
    if (h.header_bytes != sizeof(Header))
        refuse(kBad, label, "E_HEADER_BYTES", "header_bytes is %" PRIu32 ", must be %zu", h.header_bytes,
               sizeof(Header));
    if (h.incompatible != 0)
        refuse(kBad, label, "E_FLAGS", "needs features 0x%02x, this reader knows none", h.incompatible);
    if (h.alignment != kAlignment)
        refuse(kBad, label, "E_ALIGNMENT", "alignment is %u, must be %" PRIu64, h.alignment, kAlignment);
    if (h.file_bytes != size)
        refuse(kBad, label, "E_FILE_BYTES", "file has %" PRIu64 " bytes, its header says %" PRIu64, size,
               h.file_bytes);
    if (h.tensor_count > kMaxTensors)
        refuse(kBad, label, "E_COUNT", "tensor_count is %" PRIu32 ", at most %" PRIu64, h.tensor_count,
               kMaxTensors);
    if (h.index_offset != sizeof(Header))
        refuse(kBad, label, "E_INDEX_OFFSET", "index_offset is %" PRIu64 ", must be %zu", h.index_offset,
               sizeof(Header));
    if (h.index_bytes > kMaxIndexBytes || h.index_bytes > size - sizeof(Header))
        refuse(kBad, label, "E_INDEX_BYTES",
               "index_bytes is %" PRIu64 ", at most %" PRIu64 " and inside the file of %" PRIu64 " bytes",
               h.index_bytes, kMaxIndexBytes, size);
    if (h.tensor_count * sizeof(Record) > h.index_bytes)
        refuse(kBad, label, "E_INDEX_COUNT",
               "%" PRIu32 " records of %zu bytes do not fit an index of %" PRIu64 " bytes", h.tensor_count,
               sizeof(Record), h.index_bytes);
    uint64_t data = 0;
    const bool fits = checked_align_up(sizeof(Header) + h.index_bytes, kAlignment, data) && data <= size;
    if (!fits || h.data_offset != data)
        refuse(kBad, label, "E_DATA_OFFSET",
               "data_offset is %" PRIu64 ", must be %" PRIu64 " and inside the file of %" PRIu64 " bytes",
               h.data_offset, data, size);
    return h;
}

// What the records before this one have used up.
struct Progress {
    std::string_view names;  // of the index, all of them
    uint64_t file_bytes = 0;
    uint64_t name_offset = 0;   // end of the names so far
    uint64_t end = 0;           // of the data so far
    std::string_view previous;  // name; empty at first
};

// Rules 19 to 35 for one record.
void check_record(const Record& r, size_t number, Progress& so_far, const std::string& label) {
    if (r.name_bytes < 1 || r.name_bytes > kMaxNameBytes)
        refuse(kBad, label, "E_NAME_LENGTH", "tensor %zu: name of %u bytes, must be 1 to %zu", number,
               r.name_bytes, kMaxNameBytes);
    if (r.name_offset != so_far.name_offset || r.name_bytes > so_far.names.size() - so_far.name_offset)
        refuse(kBad, label, "E_NAME_RANGE",
               "tensor %zu: name at %" PRIu32 " of %u bytes, must be at %" PRIu64
               " and inside %zu bytes of names",
               number, r.name_offset, r.name_bytes, so_far.name_offset, so_far.names.size());
    const std::string_view name = so_far.names.substr(r.name_offset, r.name_bytes);
    if (const char* rule = name_rule(name))
        refuse(kBad, label, rule, "tensor %zu: name of %u bytes %s", number, r.name_bytes,
               std::strcmp(rule, "E_NAME_UTF8") == 0 ? "is not UTF-8"
                                                     : "holds a control character, '/', '\\' or '..'");
    const int length = static_cast<int>(name.size());
    const char* text = name.data();
    if (number > 0) {
        if (name == so_far.previous)
            refuse(kBad, label, "E_NAME_DUPLICATE", "tensor '%.*s' occurs twice", length, text);
        if (name <= so_far.previous)
            refuse(kBad, label, "E_NAME_ORDER", "tensor '%.*s' follows '%.*s': not sorted", length, text,
                   static_cast<int>(so_far.previous.size()), so_far.previous.data());
    }

    const size_t element = element_size(r.dtype);
    if (element == 0)
        refuse(kBad, label, "E_DTYPE", "tensor '%.*s': dtype %u, must be 1 to 7", length, text, r.dtype);
    if (r.rank > kMaxRank)
        refuse(kBad, label, "E_RANK", "tensor '%.*s': rank %u, at most %zu", length, text, r.rank, kMaxRank);
    for (size_t i = 0; i < r.rank; ++i)
        if (r.dims[i] > kMaxDim)
            refuse(kBad, label, "E_DIM", "tensor '%.*s': dimension %zu is %" PRIu64 ", at most %" PRIu64,
                   length, text, i, r.dims[i], kMaxDim);
    for (size_t i = r.rank; i < kMaxRank; ++i)
        if (r.dims[i] != 0)
            refuse(kBad, label, "E_DIM_UNUSED",
                   "tensor '%.*s': dimension %zu is %" PRIu64 " at rank %u, must be 0", length, text, i,
                   r.dims[i], r.rank);
    uint64_t bytes = 0;
    const char* shape_rule = tensor_bytes(r.dims, r.rank, element, bytes);
    if (shape_rule != nullptr)
        refuse(kBad, label, "E_OVERFLOW",
               "tensor '%.*s': its %u dimensions and %zu bytes an element multiply to 2^63 or more", length,
               text, r.rank, element);
    if (r.bytes != bytes)
        refuse(kBad, label, "E_BYTES", "tensor '%.*s': %" PRIu64 " bytes, its shape needs %" PRIu64, length,
               text, r.bytes, bytes);

    uint64_t start = 0;
    if (r.offset % kAlignment != 0)
        refuse(kBad, label, "E_OFFSET_ALIGN", "tensor '%.*s': offset %" PRIu64 " is no multiple of %" PRIu64,
               length, text, r.offset, kAlignment);
    if (r.offset < so_far.end)
        refuse(kBad, label, "E_OVERLAP",
               "tensor '%.*s': offset %" PRIu64 " is before %" PRIu64 ", the end of what comes before it",
               length, text, r.offset, so_far.end);
    if (!checked_align_up(so_far.end, kAlignment, start) || r.offset != start)
        refuse(kBad, label, "E_GAP",
               "tensor '%.*s': offset %" PRIu64 " is past %" PRIu64 ", where it must start", length, text,
               r.offset, start);
    if (r.offset > so_far.file_bytes || r.bytes > so_far.file_bytes - r.offset)
        refuse(kBad, label, "E_BOUNDS",
               "tensor '%.*s': %" PRIu64 " bytes at %" PRIu64 " end past the file's %" PRIu64 " bytes",
               length, text, r.bytes, r.offset, so_far.file_bytes);
    if (r.reserved != 0)
        refuse(kBad, label, "E_RESERVED", "tensor '%.*s': reserved field is %" PRIu32 ", must be 0", length,
               text, r.reserved);

    so_far.name_offset += r.name_bytes;
    so_far.end = r.offset + r.bytes;
    so_far.previous = name;
}

// Rule 38 for the bytes from `end` to the next multiple of the alignment, which are inside the file.
void check_padding(std::span<const std::byte> file, uint64_t end, const std::string& label) {
    for (uint64_t at = end; at % kAlignment != 0; ++at)
        if (file[at] != std::byte{0})
            refuse(kBad, label, "E_PADDING", "padding byte at %" PRIu64 " is not 0", at);
}

Record record_at(const std::vector<std::byte>& index, size_t number) {
    Record r;
    std::memcpy(&r, index.data() + number * sizeof r, sizeof r);
    return r;
}

}  // namespace

KdtrFile KdtrFile::open(const std::string& path) {
    // O_NONBLOCK: opening a pipe that nobody writes to must not wait. Regular files ignore it.
    const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
    if (file.fd < 0) refuse(ErrorCode::io, path, "E_OPEN", "cannot be opened: %s", std::strerror(errno));
    struct stat status;
    if (::fstat(file.fd, &status) != 0)
        refuse(ErrorCode::io, path, "E_MAP", "its size cannot be read: %s", std::strerror(errno));
    if (!S_ISREG(status.st_mode))
        refuse(ErrorCode::io, path, "E_NOT_REGULAR", "is %s, not a regular file",
               S_ISDIR(status.st_mode) ? "a directory" : "a pipe, socket or device");
    const size_t size = static_cast<size_t>(status.st_size);
    if (size == 0) return parse({}, path);  // an empty file cannot be mapped

    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (address == MAP_FAILED)
        refuse(ErrorCode::io, path, "E_MAP", "its %zu bytes cannot be mapped: %s", size,
               std::strerror(errno));
    std::shared_ptr<const void> mapping(address,
                                        [size](const void* p) { ::munmap(const_cast<void*>(p), size); });
    KdtrFile result = parse({static_cast<const std::byte*>(address), size}, path);
    result.mapping_ = std::move(mapping);
    return result;
}

KdtrFile KdtrFile::parse(std::span<const std::byte> memory, std::string label) {
    const Header header = check_header(memory, label);
    KdtrFile result;
    const std::byte* index_at = memory.data() + sizeof(Header);
    result.index_.assign(index_at, index_at + header.index_bytes);
    const std::vector<std::byte>& index = result.index_;
    const uint32_t crc = crc32c(index.data(), index.size());
    if (header.index_crc != crc)
        refuse(kBad, label, "E_INDEX_CRC", "index checksum is %08" PRIx32 ", stored is %08" PRIx32, crc,
               header.index_crc);

    const size_t records_bytes = header.tensor_count * sizeof(Record);
    Progress so_far;
    so_far.names = {reinterpret_cast<const char*>(index.data()) + records_bytes,
                    index.size() - records_bytes};
    so_far.file_bytes = header.file_bytes;
    so_far.end = header.data_offset;
    for (size_t i = 0; i < header.tensor_count; ++i) check_record(record_at(index, i), i, so_far, label);

    if (so_far.name_offset != so_far.names.size())
        refuse(kBad, label, "E_NAME_TABLE", "names end after %" PRIu64 " of %zu bytes", so_far.name_offset,
               so_far.names.size());
    uint64_t end = 0;
    if (!checked_align_up(so_far.end, kAlignment, end) || end != header.file_bytes)
        refuse(kBad, label, "E_TRAILING", "data ends at %" PRIu64 ", the file at %" PRIu64, end,
               header.file_bytes);
    check_padding(memory, sizeof(Header) + header.index_bytes, label);
    for (size_t i = 0; i < header.tensor_count; ++i) {
        const Record r = record_at(index, i);
        check_padding(memory, r.offset + r.bytes, label);
    }

    // Everything holds: from here on the file is believed.
    result.names_.reserve(header.tensor_count);
    result.tensors_.reserve(header.tensor_count);
    for (size_t i = 0; i < header.tensor_count; ++i) {
        const Record r = record_at(index, i);
        TensorView view;
        view.dtype = static_cast<DType>(r.dtype);
        view.shape.assign(r.dims, r.dims + r.rank);
        view.data = memory.data() + r.offset;
        view.bytes = r.bytes;
        result.names_.push_back(so_far.names.substr(r.name_offset, r.name_bytes));
        result.tensors_.push_back(std::move(view));
    }
    result.label_ = std::move(label);
    return result;
}

const TensorView* KdtrFile::find(std::string_view name) const {
    const auto at = std::lower_bound(names_.begin(), names_.end(), name);
    return at != names_.end() && *at == name ? &tensors_[static_cast<size_t>(at - names_.begin())] : nullptr;
}

void KdtrFile::verify_checksums() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
        const uint32_t stored = record_at(index_, i).crc;
        const uint32_t crc = crc32c(tensors_[i].data, tensors_[i].bytes);
        if (crc != stored)
            refuse(kBad, label_, "E_TENSOR_CRC",
                   "tensor '%.*s': checksum of its %zu bytes is %08" PRIx32 ", stored is %08" PRIx32,
                   static_cast<int>(names_[i].size()), names_[i].data(), tensors_[i].bytes, crc, stored);
    }
}

}  // namespace kdt
