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
constexpr int kPartsPerThread = 4;

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

ThreadPool::ThreadPool(int threads)
    : parts_(threads * kPartsPerThread),
      taken_(new std::atomic<bool>[static_cast<size_t>(parts_)]),
      owner_(getpid()) {
    for (int part = 0; part < parts_; ++part) taken_[static_cast<size_t>(part)].store(true);
    workers_.reserve(static_cast<size_t>(threads - 1));
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
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
    left_.store(parts, std::memory_order_relaxed);
    // Whoever takes a part sees the task, even a worker that comes late from the round before.
    for (int part = 0; part < parts; ++part)
        taken_[static_cast<size_t>(part)].store(false, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    take_parts(0);
    for (int spin = 0; spin < kSpins; ++spin) {
        if (left_.load(std::memory_order_acquire) == 0) return;
        pause();
    }
    for (int left; (left = left_.load(std::memory_order_acquire)) != 0;) left_.wait(left);
}

// A thread starts at its own share, where its caches and its memory are likely to be, and then helps the
// others.
void ThreadPool::take_parts(int thread) {
    for (int i = 0; i < parts_; ++i) {
        const size_t part = static_cast<size_t>((thread * kPartsPerThread + i) % parts_);
        if (taken_[part].load(std::memory_order_relaxed) ||
            taken_[part].exchange(true, std::memory_order_acquire))
            continue;
        task_(context_, static_cast<int>(part), thread);
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
    }
}

void ThreadPool::work(int thread) {
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
        take_parts(thread);
    }
}

}  // namespace kdt::cpu
