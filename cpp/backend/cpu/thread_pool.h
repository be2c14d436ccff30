// A fixed set of threads that work on one function together. Work is cut by outputs; nothing that is computed
// depends on how it was cut or on who did which part.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace kdt::cpu {

// Round to nearest, denormals kept, exceptions masked, for the lifetime of the object: what the caller had
// set is put back.
class FloatMode {
  public:
    FloatMode();
    ~FloatMode();
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
    unsigned saved_ = 0;
};

class ThreadPool {
  public:
    explicit ThreadPool(int threads);  // the caller is one of them
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls f(begin, end, thread) for consecutive ranges of [0, count) that cover it; thread < size() is the
    // one that runs the call. At most one range per `grain` items, so that small work stays on the calling
    // thread. Returns when all are done. f must not throw. One caller at a time.
    template <class F>
    void split(int64_t count, int64_t grain, const F& f) {
        if (count <= 0) return;
        const int64_t wanted = (count + grain - 1) / grain;
        const int parts = static_cast<int>(wanted < parts_ ? wanted : parts_);
        if (parts <= 1 || size() == 1 || forked()) {
            f(int64_t{0}, count, 0);
            return;
        }
        struct Call {
            const F& f;
            int64_t count;
            int parts;
        } call{f, count, parts};
        run(
            parts,
            [](void* context, int part, int thread) {
                const Call& c = *static_cast<const Call*>(context);
                c.f(c.count * part / c.parts, c.count * (part + 1) / c.parts, thread);
            },
            &call);
    }

  private:
    using Task = void (*)(void* context, int part, int thread);
    void run(int parts, Task task, void* context);
    void take_parts(int thread);
    void work(int thread);
    bool forked() const;  // in a child of fork(): the workers do not exist there

    std::vector<std::thread> workers_;
    int parts_;  // at most: several for each thread, so that one that the system holds up delays little
    std::unique_ptr<std::atomic<bool>[]> taken_;  // [parts_]; all true between rounds
    std::atomic<int> left_{0};                    // parts that are not done
    std::atomic<uint32_t> round_{0};
    std::atomic<bool> stop_{false};
    Task task_ = nullptr;
    void* context_ = nullptr;
    int owner_;
};

}  // namespace kdt::cpu
