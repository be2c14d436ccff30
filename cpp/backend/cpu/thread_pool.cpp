#include "backend/cpu/thread_pool.h"

#include <unistd.h>

#include <cfenv>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kdt::cpu {

namespace {

// How long a thread looks for news before it goes to sleep: longer than the pause between two ops of a
// forward pass, short against a time slice.
constexpr int kSpins = 4000;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

#if defined(__x86_64__)
FloatMode::FloatMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kDefault = 0x1F80;
    if (saved_ != kDefault) _mm_setcsr(kDefault);
}

FloatMode::~FloatMode() {
    _mm_setcsr(saved_);
}
#else
FloatMode::FloatMode() : saved_(static_cast<unsigned>(std::fegetround())) {
    std::fesetround(FE_TONEAREST);
}

FloatMode::~FloatMode() {
    std::fesetround(static_cast<int>(saved_));
}
#endif

ThreadPool::ThreadPool(int threads) : owner_(getpid()) {
    workers_.reserve(static_cast<size_t>(threads - 1));
    for (int part = 1; part < threads; ++part) workers_.emplace_back([this, part] { work(part); });
}

ThreadPool::~ThreadPool() {
    if (forked()) {  // handles of threads that do not exist here
        for (std::thread& worker : workers_) worker.detach();
        return;
    }
    stop_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::forked() const {
    return !workers_.empty() && getpid() != owner_;
}

void ThreadPool::run(int parts, Task task, void* context) {
    task_ = task;
    context_ = context;
    parts_ = parts;
    pending_.store(size() - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    task(context, 0);
    for (int spin = 0; spin < kSpins; ++spin) {
        if (pending_.load(std::memory_order_acquire) == 0) return;
        pause();
    }
    for (int left; (left = pending_.load(std::memory_order_acquire)) != 0;) pending_.wait(left);
}

void ThreadPool::work(int part) {
    const FloatMode mode;
    uint32_t seen = 0;
    for (;;) {
        uint32_t now = round_.load(std::memory_order_acquire);
        for (int spin = 0; now == seen && spin < kSpins; ++spin) {
            pause();
            now = round_.load(std::memory_order_acquire);
        }
        if (now == seen) {
            round_.wait(seen);
            continue;
        }
        seen = now;
        if (stop_.load()) return;
        if (part < parts_) task_(context_, part);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
    }
}

}  // namespace kdt::cpu
