// The KDTR writer: checks first, then a temporary file beside the target, flushed and renamed over it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "core/checked.h"
#include "core/crc32c.h"
#include "core/kdtr_format.h"

namespace kdt {

namespace {

using namespace kdtr;

// What the file will hold, data apart.
struct Plan {
    Header header{};
    std::vector<std::byte> index;
    std::vector<const NamedTensor*> order;
    std::vector<uint64_t> offsets;
};

Record make_record(const NamedTensor& named, const std::string& path) {
    const TensorView& t = named.tensor;
    const int length = static_cast<int>(std::min(named.name.size(), kMaxNameBytes));
    const char* text = named.name.data();
    const auto invalid = ErrorCode::invalid_argument;

    Record r{};
    r.name_bytes = static_cast<uint16_t>(named.name.size());
    r.dtype = static_cast<uint8_t>(t.dtype);
    const size_t element = element_size(r.dtype);
    if (element == 0)
        refuse(invalid, path, "E_DTYPE", "tensor '%.*s': dtype %u, must be 1 to 7", length, text, r.dtype);
    if (t.shape.size() > kMaxRank)
        refuse(invalid, path, "E_RANK", "tensor '%.*s': rank %zu, at most %zu", length, text, t.shape.size(),
               kMaxRank);
    r.rank = static_cast<uint8_t>(t.shape.size());
    std::copy(t.shape.begin(), t.shape.end(), r.dims);  // a negative one becomes huge and breaks rule 27
    if (const char* rule = tensor_bytes(r.dims, r.rank, element, r.bytes))
        refuse(invalid, path, rule, "tensor '%.*s': shape %s of %zu-byte elements is not storable", length,
               text, shape_text(t.shape).c_str(), element);
    if (r.bytes != t.bytes)
        refuse(invalid, path, "E_BYTES", "tensor '%.*s': %zu bytes, its shape needs %" PRIu64, length, text,
               t.bytes, r.bytes);
    r.crc = crc32c(t.data, t.bytes);
    return r;
}

Plan make_plan(std::span<const NamedTensor> tensors, const std::string& path) {
    const auto invalid = ErrorCode::invalid_argument;
    Plan plan;
    if (tensors.size() > kMaxTensors)
        refuse(invalid, path, "E_COUNT", "%zu tensors, at most %" PRIu64, tensors.size(), kMaxTensors);
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (const char* rule = name_rule(tensors[i].name))
            refuse(invalid, path, rule,
                   "tensor %zu: its name of %zu bytes must be UTF-8 of 1 to %zu bytes without control "
                   "characters, "
                   "'/', '\\' and '..'",
                   i, tensors[i].name.size(), kMaxNameBytes);
        plan.order.push_back(&tensors[i]);
    }
    std::sort(plan.order.begin(), plan.order.end(),
              [](const NamedTensor* a, const NamedTensor* b) { return a->name < b->name; });

    std::vector<Record> records;
    std::string names;
    for (const NamedTensor* named : plan.order) {
        if (!records.empty() && named->name == plan.order[records.size() - 1]->name)
            refuse(invalid, path, "E_NAME_DUPLICATE", "tensor '%.*s' occurs twice",
                   static_cast<int>(named->name.size()), named->name.data());
        Record r = make_record(*named, path);
        r.name_offset = static_cast<uint32_t>(names.size());
        names += named->name;
        records.push_back(r);
    }

    Header& h = plan.header;
    h.index_bytes = records.size() * sizeof(Record) + names.size();
    if (h.index_bytes > kMaxIndexBytes)
        refuse(invalid, path, "E_INDEX_BYTES", "index of %" PRIu64 " bytes, at most %" PRIu64, h.index_bytes,
               kMaxIndexBytes);
    uint64_t end = 0;
    bool fits = checked_align_up(sizeof(Header) + h.index_bytes, kAlignment, end);
    h.data_offset = end;
    for (Record& r : records) {
        r.offset = end;
        plan.offsets.push_back(end);
        fits = fits && checked_add(end, r.bytes, end) && checked_align_up(end, kAlignment, end) &&
               end <= kMaxTensorBytes;
    }
    if (!fits) refuse(invalid, path, "E_OVERFLOW", "the tensors together have 2^63 bytes or more");

    plan.index.resize(h.index_bytes);
    if (!records.empty()) {
        std::memcpy(plan.index.data(), records.data(), records.size() * sizeof(Record));
        std::memcpy(plan.index.data() + records.size() * sizeof(Record), names.data(), names.size());
    }
    std::memcpy(h.magic, kMagic, sizeof kMagic);
    std::memcpy(h.guard, kGuard, sizeof kGuard);
    h.major = kMajor;
    h.minor = kMinor;
    h.header_bytes = sizeof(Header);
    h.file_bytes = end;
    h.index_offset = sizeof(Header);
    h.tensor_count = static_cast<uint32_t>(records.size());
    h.alignment = kAlignment;
    h.index_crc = crc32c(plan.index.data(), plan.index.size());
    h.header_crc = crc32c(&h, kHeaderCrcAt);
    return plan;
}

[[noreturn]] void refuse_write(const std::string& path, const char* step) {
    const int error = errno;
    refuse(ErrorCode::io, path, "E_WRITE", "%s failed: %s (errno %d)", step, std::strerror(error), error);
}

// A new file beside the target that is removed again unless it is renamed over it.
class TemporaryFile {
  public:
    TemporaryFile(const std::string& target, const std::string& folder) : target_(target) {
        static std::atomic<unsigned> counter{0};
        do {
            path_ =
                folder + "/.kdtr-" + std::to_string(::getpid()) + "-" + std::to_string(counter++) + ".tmp";
            fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        } while (fd_ < 0 && errno == EEXIST);  // left by a process of the same number that was killed
        if (fd_ < 0) refuse_write(target, "creating a temporary file beside it");
    }
    ~TemporaryFile() {
        if (fd_ >= 0) ::close(fd_);
        if (!path_.empty()) ::unlink(path_.c_str());
    }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    void write(const void* data, size_t bytes) {
        const auto* at = static_cast<const char*>(data);
        while (bytes > 0) {
            const ssize_t written = ::write(fd_, at, std::min(bytes, size_t{1} << 30));
            if (written < 0) {
                if (errno == EINTR) continue;
                refuse_write(target_, "writing");
            }
            at += written;
            bytes -= static_cast<size_t>(written);
            position_ += static_cast<uint64_t>(written);
        }
    }
    void pad() {
        static constexpr char kZeros[kAlignment] = {};
        write(kZeros, (kAlignment - position_ % kAlignment) % kAlignment);
    }
    void replace_target() {
        if (::fsync(fd_) != 0) refuse_write(target_, "flushing");
        const int fd = fd_;
        fd_ = -1;
        if (::close(fd) != 0) refuse_write(target_, "closing");
        if (::rename(path_.c_str(), target_.c_str()) != 0) refuse_write(target_, "renaming");
        path_.clear();
    }

  private:
    const std::string& target_;
    std::string path_;
    int fd_ = -1;
    uint64_t position_ = 0;
};

void flush_folder(const std::string& folder, const std::string& path) {
    const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        if (errno == EACCES) return;  // a folder that may be written but not read: the file stands, unflushed
        refuse_write(path, "opening its folder");
    }
    // File systems that cannot flush a folder say EINVAL.
    const bool failed = ::fsync(fd) != 0 && errno != EINVAL;
    const int error = errno;
    ::close(fd);
    errno = error;
    if (failed) refuse_write(path, "flushing its folder");
}

}  // namespace

void write_kdtr(const std::string& path, std::span<const NamedTensor> tensors) {
    const Plan plan = make_plan(tensors, path);
    struct stat status;
    if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
        refuse(ErrorCode::io, path, "E_NOT_REGULAR", "exists and is not a regular file");

    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    TemporaryFile file(path, folder);
    file.write(&plan.header, sizeof plan.header);
    file.write(plan.index.data(), plan.index.size());
    file.pad();
    for (const NamedTensor* named : plan.order) {
        file.write(named->tensor.data, named->tensor.bytes);
        file.pad();
    }
    file.replace_target();
    flush_folder(folder, path);
}

}  // namespace kdt
