// Data races of emulated kernels: which accesses to shared and global memory does the CUDA memory model
// order? Every emulated thread has a vector clock that only what orders memory moves (barriers, __syncwarp,
// mbarriers, waits for copies, grid_wait), and every four bytes of memory remember who read and wrote them
// and when. Two accesses of different threads, one of them a write, of which neither is ordered before the
// other, are a race: in shared memory, between the blocks of a launch in global memory, with an earlier
// kernel for what a thread touches before grid_wait, and with a kernel of another stream that no event
// orders. A visit to another block's shared memory that nothing orders before that block's end is one too.
//
// The kernels are compiled with -fsanitize=thread, which puts a call before each access; the runtime behind
// the calls is races.cpp, not libtsan (as the Linux kernel's KCSAN does): libtsan counts a fiber as a host
// thread, which GCC 12's is slow to start and of which clang 14's tells no more than 256 apart.
//
// Without KDT_RACES, as in kdtree-cuda-emulated, all of this is empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#if defined(KDT_RACES)
#define KDT_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define KDT_UNCHECKED
#endif

namespace kdt_emulator::races {

enum class Access : uint8_t { none, read, write, atomic };

#if defined(KDT_RACES)

struct Clock;
struct Actor;  // an emulated thread
struct Gathering;

// Where threads meet: gathers what arrives, until `finish`; whoever waits acquires what was finished last.
class Meeting {
  public:
    Meeting();
    ~Meeting();
    Meeting(Meeting&&) noexcept;
    Meeting& operator=(Meeting&&) noexcept;

    void arrive(Actor& by);                  // all that `by` did and knows is ordered before the next finish
    void bring(Actor& by, uint32_t copies);  // only its asynchronous copies up to this number
    void finish();
    void acquire(Actor& by, bool took_part);  // took_part: `by` was among those who arrived

  private:
    std::unique_ptr<Gathering> state_;
};

// Addresses whose accesses are looked at. Shared memory of a new cluster takes the place of the old one's.
unsigned char* reserve_shared(size_t bytes);
unsigned char* reserve_global(size_t bytes);
void forget_shared();

// A place in a stream: what has ended there (or will have, before what follows), kernel by kernel. Two
// streams can be told apart, 0 and 1.
struct Line {
    uint32_t after_wait[2] = {};  // for whoever has waited (grid_wait)
    uint32_t from_the_start[2] =
        {};  // also before: the kernel in front had waited before it let this one start
};
Line record_event(int stream);
void wait_event(int stream, const Line& event);

void begin_launch(int stream);
void begin_cluster(size_t blocks, size_t threads_per_block);
void end_cluster();
void end_launch();     // says what was found
void order_streams();  // a copy, a fill, a host that waits: all that was launched before has ended

// The actor behind a thread of the cluster; the one that runs.
Actor& actor(size_t block, size_t thread);
void run_as(Actor* actor);

// `pc`: the place in the kernel, for reports; `touch` is called by it.
void touch(const void* at, size_t bytes, Access access);
void touch_from(const void* at, size_t bytes, Access access, const void* pc);
// The asynchronous side of a thread: a copy reads and writes at its issue, as somebody of whom the thread
// itself knows only after a wait. Copies are numbered; `close_copies` gives the number of those issued so
// far.
void touch_as_copy(const void* at, size_t bytes, Access access, const void* pc);
uint32_t close_copies();
void wait_for_copies(uint32_t number);
void grid_wait();
void grid_launch_next();

// Whether the environment's KDTREE_RACES_WITHOUT, FILE:LINE, names this place: what stands there then still
// waits and orders nothing. A barrier that can be left out so, and no case notices, is one that no case
// needs.
bool is_ignored(const std::source_location& place);

// Races found since the last call. `quiet`: they are not printed until further notice.
std::vector<std::string> take();
void quiet(bool yes);

#else

struct Actor {};
struct Meeting {
    void arrive(Actor&) {}
    void bring(Actor&, uint32_t) {}
    void finish() {}
    void acquire(Actor&, bool) {}
};
inline void forget_shared() {}
struct Line {};
inline Line record_event(int) {
    return {};
}
inline void wait_event(int, const Line&) {}
inline void begin_launch(int) {}
inline void begin_cluster(size_t, size_t) {}
inline void end_cluster() {}
inline void end_launch() {}
inline void order_streams() {}
inline Actor& actor(size_t, size_t) {
    static Actor nobody;
    return nobody;
}
inline void run_as(Actor*) {}
inline void touch(const void*, size_t, Access) {}
inline void touch_from(const void*, size_t, Access, const void*) {}
inline void touch_as_copy(const void*, size_t, Access, const void*) {}
inline uint32_t close_copies() {
    return 0;
}
inline void wait_for_copies(uint32_t) {}
inline void grid_wait() {}
inline void grid_launch_next() {}
inline bool is_ignored(const std::source_location&) {
    return false;
}

#endif

}  // namespace kdt_emulator::races
