// Turns: the lock behind "any number of threads". Waiters are served in the order in which they came, so that
// no thread which decodes in a loop keeps the others out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace kdt {

class Turns {
  public:
    Turns() = default;
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // For std::lock_guard and std::unique_lock. A thread that has the turn must not ask for it again.
    void lock() { take(nullptr); }
    void unlock();
    // Waits until it has the turn or `cancel` is set; false then, and the turn is not taken.
    bool lock_unless(const std::atomic<bool>& cancel) { return take(&cancel); }

    // What a thread does before it waits and after, whatever Turns it waits for: a language's bindings let go
    // of the interpreter's lock, which whoever has the turn may need before it gives it up. `before` returns
    // what `after` is told. To be set before there is a second thread.
    struct Pause {
        void* (*before)();
        void (*after)(void*);
    };
    static void pause_waits_with(Pause pause) { pause_ = pause; }

  private:
    bool take(const std::atomic<bool>* cancel);
    bool wait(const std::atomic<bool>* cancel);

    static inline Pause pause_{nullptr, nullptr};

    std::mutex mutex_;  // of what follows; never held for long, nor while something else is waited for
    std::condition_variable changed_;
    std::deque<uint64_t> waiting_;
    uint64_t next_ = 0;
    bool taken_ = false;
};

}  // namespace kdt
