#include "backend/cpu/memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"

namespace kdt::cpu {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kWorthAsking = size_t{16} << 20;  // smaller requests are not checked against what is left

// The first number after `key` in a file of "key number" lines, or of the file itself without a key.
bool read_number(const char* path, const char* key, size_t& value) {
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return false;
    char line[256];
    bool found = false;
    while (!found && std::fgets(line, sizeof line, file) != nullptr) {
        const char* at = line;
        if (key != nullptr) {
            if (std::strncmp(line, key, std::strlen(key)) != 0) continue;
            at += std::strlen(key);
        }
        char* end = nullptr;
        const unsigned long long number = std::strtoull(at, &end, 10);
        if (end != at) {
            value = static_cast<size_t>(number);
            found = true;
        }
        if (key == nullptr) break;
    }
    std::fclose(file);
    return found;
}

// What the container leaves: its limit less its use, page cache that can be dropped not counted.
size_t left_in_container() {
    size_t limit, used, cache = 0;
    if (read_number("/sys/fs/cgroup/memory.max", nullptr, limit) &&
        read_number("/sys/fs/cgroup/memory.current", nullptr, used)) {
        read_number("/sys/fs/cgroup/memory.stat", "inactive_file ", cache);
    } else if (read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", nullptr, limit) &&
               read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes", nullptr, used)) {
        read_number("/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ", cache);
    } else {
        return SIZE_MAX;
    }
    used = used > cache ? used - cache : 0;
    return limit > used ? limit - used : 0;
}

[[noreturn]] void refuse(size_t bytes, const char* what, size_t left) {
    fail(ErrorCode::out_of_memory, "%s needs %.1f MiB; %.1f MiB are left", what,
         static_cast<double>(bytes) / 1048576.0, static_cast<double>(left) / 1048576.0);
}

}  // namespace

size_t available_memory() {
    size_t kib = 0;
    size_t left = read_number("/proc/meminfo", "MemAvailable:", kib) ? kib * 1024 : SIZE_MAX;
    const size_t container = left_in_container();
    return left < container ? left : container;
}

void* allocate(size_t bytes, const char* what) {
    const bool large = bytes >= kHugePage;
    const size_t alignment = large ? kHugePage : 64;
    if (bytes > SIZE_MAX / 2) refuse(bytes, what, available_memory());
    if (bytes >= kWorthAsking) {
        const size_t left = available_memory();
        if (bytes > left) refuse(bytes, what, left);
    }
    const size_t padded = bytes == 0 ? 64 : (bytes + 63) / 64 * 64;
    void* pointer = nullptr;
    if (posix_memalign(&pointer, alignment, padded) != 0) refuse(bytes, what, available_memory());
#if defined(MADV_HUGEPAGE)
    if (large) madvise(pointer, padded, MADV_HUGEPAGE);
#endif
    const char* poison = std::getenv("KDTREE_POISON");
    if (poison != nullptr && std::strcmp(poison, "1") == 0) std::memset(pointer, 0xFF, padded);
    return pointer;
}

void Free::operator()(void* pointer) const {
    std::free(pointer);
}

}  // namespace kdt::cpu
