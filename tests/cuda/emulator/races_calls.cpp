// What -fsanitize=thread calls before each access and at each function's begin and end, as GCC and clang emit
// it, and call stacks. Compiled without that option itself.
#include "races_calls.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_map>

#include "races.h"

extern "C" const char __executable_start;

namespace kdt_emulator::races {

namespace {

struct Frame {
    uint32_t parent;
    const void* place;
};
std::vector<Frame> frames{{0, nullptr}};
std::unordered_map<uint64_t, uint32_t> numbers;

struct Recent {
    uint64_t key;
    uint32_t number;
};
Recent recent[4096];

uint32_t number_of(uint32_t parent, const void* place) {
    const uint64_t key = reinterpret_cast<uintptr_t>(place) << 24 ^ parent;  // code lies within 2^40
    Recent& slot = recent[(key ^ key >> 24 ^ key >> 36) % 4096];
    if (slot.key == key && slot.number != 0) return slot.number;
    const auto [at, fresh] = numbers.try_emplace(key, static_cast<uint32_t>(frames.size()));
    if (fresh) frames.push_back({parent, place});
    slot = {key, at->second};
    return at->second;
}

}  // namespace

uint32_t CallStack::at(const void* place) const {
    return number_of(frames_.empty() ? 0 : frames_.back(), place);
}

// By addr2line, which comes with the compiler's binutils.
std::vector<std::string> names_of(uint32_t stack) {
    if (stack == 0) return {};
    std::string command = "addr2line -Cfi -e /proc/" + std::to_string(getpid()) + "/exe";
    for (; stack != 0; stack = frames[stack].parent) {
        if (frames[stack].place == nullptr) continue;
        char text[32];  // the call, not where it returns to
        std::snprintf(
            text, sizeof text, " %#zx",
            static_cast<size_t>(static_cast<const char*>(frames[stack].place) - &__executable_start) - 1);
        command += text;
    }
    std::vector<std::string> names, own;
    std::FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r");
    if (pipe != nullptr) {
        static char function[65536], place[4096];
        while (std::fgets(function, sizeof function, pipe) && std::fgets(place, sizeof place, pipe)) {
            place[std::strcspn(place, " \n")] = 0;
            std::string name = function;  // without its namespace and its parameters
            for (const char* const part : {"(anonymous namespace)::", "kdt::cuda::"})
                for (size_t at; (at = name.find(part)) != std::string::npos;)
                    name.erase(at, std::strlen(part));
            name.resize(std::min(name.size(), name.find_first_of("(\n")));
            const char* const source = std::strstr(place, "/backend/cuda/");
            const bool of_the_emulator =
                std::strstr(place, "/emulator/") != nullptr || std::strstr(place, "/c++/") != nullptr;
            (of_the_emulator ? own : names)
                .push_back(std::string(source != nullptr ? source + 14 : place) + "  " + name);
        }
        pclose(pipe);
    }
    if (names.empty()) names = std::move(own);
    if (names.empty()) names.push_back("(addr2line was not found)");
    return names;
}

}  // namespace kdt_emulator::races

using kdt_emulator::races::Access;
using kdt_emulator::races::touch_from;

#define KDT_CALL extern "C" __attribute__((visibility("default"))) void
#define KDT_ACCESS(bytes)                                                  \
    KDT_CALL __tsan_read##bytes(void* at) {                                \
        touch_from(at, bytes, Access::read, __builtin_return_address(0));  \
    }                                                                      \
    KDT_CALL __tsan_write##bytes(void* at) {                               \
        touch_from(at, bytes, Access::write, __builtin_return_address(0)); \
    }                                                                      \
    KDT_CALL __tsan_unaligned_read##bytes(void* at) {                      \
        touch_from(at, bytes, Access::read, __builtin_return_address(0));  \
    }                                                                      \
    KDT_CALL __tsan_unaligned_write##bytes(void* at) {                     \
        touch_from(at, bytes, Access::write, __builtin_return_address(0)); \
    }                                                                      \
    KDT_CALL __tsan_volatile_read##bytes(void* at) {                       \
        touch_from(at, bytes, Access::read, __builtin_return_address(0));  \
    }                                                                      \
    KDT_CALL __tsan_volatile_write##bytes(void* at) {                      \
        touch_from(at, bytes, Access::write, __builtin_return_address(0)); \
    }

KDT_CALL __tsan_init() {}
KDT_ACCESS(1)
KDT_ACCESS(2)
KDT_ACCESS(4)
KDT_ACCESS(8)
KDT_ACCESS(16)
KDT_CALL __tsan_read_range(void* at, size_t bytes) {
    touch_from(at, bytes, Access::read, __builtin_return_address(0));
}
KDT_CALL __tsan_write_range(void* at, size_t bytes) {
    touch_from(at, bytes, Access::write, __builtin_return_address(0));
}
KDT_CALL __tsan_vptr_update(void**, void*) {}
KDT_CALL __tsan_vptr_read(void**) {}
KDT_CALL __tsan_func_entry(void* call) {
    if (auto* const stack = kdt_emulator::races::running_stack()) stack->enter(call);
}
KDT_CALL __tsan_func_exit() {
    if (auto* const stack = kdt_emulator::races::running_stack()) stack->leave();
}

// Host code in the kernels' files has atomics (launch.h); emulated kernels have CUDA's, which call `touch`.
extern "C" uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int) {
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
extern "C" uint64_t __tsan_atomic64_fetch_or(volatile uint64_t* at, uint64_t bits, int) {
    return __atomic_fetch_or(at, bits, __ATOMIC_SEQ_CST);
}
extern "C" uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) {
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
extern "C" uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* at, uint32_t n, int) {
    return __atomic_fetch_add(at, n, __ATOMIC_SEQ_CST);
}

// clang calls these where GCC calls memcpy or writes the accesses out.
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
    touch_from(from, bytes, Access::read, __builtin_return_address(0));
    touch_from(to, bytes, Access::write, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t bytes) {
    touch_from(from, bytes, Access::read, __builtin_return_address(0));
    touch_from(to, bytes, Access::write, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
extern "C" void* __tsan_memset(void* to, int byte, size_t bytes) {
    touch_from(to, bytes, Access::write, __builtin_return_address(0));
    return std::memset(to, byte, bytes);
}
