#include "engine/turns.h"

#include <algorithm>
#include <chrono>

namespace kdt {

namespace {

// A flag that may be set from a signal's handler cannot wake anyone: who waits looks at it now and again.
constexpr std::chrono::milliseconds kLook{10};

}  // namespace

bool Turns::take(const std::atomic<bool>* cancel) {
    {
        const std::lock_guard lock(mutex_);
        if (!taken_ && waiting_.empty()) {
            taken_ = true;
            return true;
        }
    }
    if (pause_.before == nullptr) return wait(cancel);
    // The interpreter's lock is taken back with `mutex_` free: whoever has it may be about to ask for a turn.
    void* const paused = pause_.before();
    const bool taken = wait(cancel);
    pause_.after(paused);
    return taken;
}

bool Turns::wait(const std::atomic<bool>* cancel) {
    std::unique_lock lock(mutex_);
    const uint64_t own = next_++;
    waiting_.push_back(own);
    const auto is_next = [&] { return !taken_ && waiting_.front() == own; };
    bool cancelled = false;
    if (cancel == nullptr) {
        changed_.wait(lock, is_next);
    } else {
        while (!is_next() && !(cancelled = cancel->load(std::memory_order_relaxed)))
            changed_.wait_for(lock, kLook);
    }
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), own));
    if (cancelled)
        changed_.notify_all();  // it may have been the next one
    else
        taken_ = true;
    return !cancelled;
}

void Turns::unlock() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    if (!waiting_.empty()) changed_.notify_all();
}

}  // namespace kdt
