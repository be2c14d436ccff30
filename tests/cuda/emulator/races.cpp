// The race detector's clocks, shadow memory and reports; races.h says what it is. The entry points that
// -fsanitize=thread calls are in races_calls.cpp.
#include "races.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

#include "races_calls.h"

namespace kdt_emulator::races {

// ----------------------------------------------------------------------------------------------------------------
// clocks

// What is known of every thread of the cluster: all its accesses up to this epoch are ordered before. The
// second half of `seen` stands for the threads' asynchronous copies.
struct Clock {
    int users = 0;
    bool waited = false;  // by somebody for earlier kernels: what they did is seen by the whole grid
    uint32_t seen[1];
};

namespace {

size_t actors_now = 0;  // of the cluster, in whole warps

size_t clock_bytes() {
    return sizeof(Clock) + (2 * actors_now - 1) * sizeof(uint32_t);
}

class Ref {
  public:
    Ref() = default;
    explicit Ref(Clock* clock) : clock_(clock) { ++clock_->users; }
    Ref(const Ref& other) : clock_(other.clock_) {
        if (clock_ != nullptr) ++clock_->users;
    }
    Ref& operator=(Ref other) {
        std::swap(clock_, other.clock_);
        return *this;
    }
    ~Ref() {
        if (clock_ != nullptr && --clock_->users == 0) std::free(clock_);
    }
    Clock* get() const { return clock_; }
    Clock* operator->() const { return clock_; }
    explicit operator bool() const { return clock_ != nullptr; }

  private:
    Clock* clock_ = nullptr;
};

Ref new_clock() {
    return Ref(static_cast<Clock*>(std::calloc(1, clock_bytes())));
}

Ref copy_of(const Ref& from) {
    auto* const to = static_cast<Clock*>(std::malloc(clock_bytes()));
    std::memcpy(static_cast<void*>(to), from.get(), clock_bytes());
    to->users = 0;
    return Ref(to);
}

void join(Clock& to, const Clock& from) {
    const size_t n = 2 * actors_now;
    for (size_t i = 0; i < n; ++i) to.seen[i] = std::max(to.seen[i], from.seen[i]);
    to.waited |= from.waited;
}

}  // namespace

// Threads that met share one clock; of its own accesses and copies a thread knows by itself.
struct Actor {
    uint32_t id = 0;
    Ref clock;
    uint32_t epoch = 1;
    uint32_t copies = 1;  // the number of the next copy
    uint32_t copied = 0;  // its own copies up to this one have been waited for
    bool waited = false;
    CallStack stack;
};

struct Gathering {
    Ref open, finished;
    std::vector<Ref> joined;  // already part of `open`
    uint32_t latest = 0, next = 0;
    Ref before, after;  // the last join on acquiring: lanes of a warp have the same
    const Clock* acquired = nullptr;
};

Meeting::Meeting() : state_(std::make_unique<Gathering>()) {}
Meeting::~Meeting() = default;
Meeting::Meeting(Meeting&&) noexcept = default;
Meeting& Meeting::operator=(Meeting&&) noexcept = default;

void Meeting::arrive(Actor& by) {
    Gathering& g = *state_;
    if (!g.open) {
        g.open = copy_of(by.clock);
        g.joined.assign(1, by.clock);
    } else if (std::none_of(g.joined.begin(), g.joined.end(),
                            [&](const Ref& r) { return r.get() == by.clock.get(); })) {
        join(*g.open.get(), *by.clock.get());
        g.joined.push_back(by.clock);
    }
    uint32_t* const seen = g.open->seen;
    seen[by.id] = by.epoch;
    seen[by.id + actors_now] = std::max(seen[by.id + actors_now], by.copied);
    g.open->waited |= by.waited;
    g.latest = std::max(g.latest, by.epoch);
    ++by.epoch;
}

void Meeting::bring(Actor& by, uint32_t copies) {
    Gathering& g = *state_;
    if (!g.open) g.open = new_clock();
    uint32_t& seen = g.open->seen[by.id + actors_now];
    seen = std::max(seen, copies);
}

void Meeting::finish() {
    Gathering& g = *state_;
    g.finished = g.open;
    g.open = Ref();
    g.joined.clear();
    g.next = g.latest + 1;
}

void Meeting::acquire(Actor& by, bool took_part) {
    Gathering& g = *state_;
    if (!g.finished) return;
    if (took_part) {  // the clock holds all that `by` knew, and lanes that met count in step again
        by.clock = g.finished;
        by.epoch = std::max(by.epoch, g.next);
        return;
    }
    if (g.acquired != g.finished.get() || g.before.get() != by.clock.get() || !g.after) {
        g.before = by.clock;
        g.after = copy_of(by.clock);
        join(*g.after.get(), *g.finished.get());
        g.acquired = g.finished.get();
    }
    by.clock = g.after;
}

// ----------------------------------------------------------------------------------------------------------------
// shadow memory

namespace {

// Lanes of one warp that did the same to the same bytes at the same epoch.
struct Record {
    uint32_t cluster;  // counted over all launches
    uint32_t epoch;
    uint32_t stack;
    uint32_t lanes;
    uint16_t warp;  // those of the asynchronous copies come after those of the threads
    uint8_t bytes;  // of the four
    Access access;
};

struct Cell {
    Record first[3];
    uint32_t more;  // 1 + its place in `lists`, once three were too few
};
static_assert(sizeof(Cell) == 64);

constexpr size_t kSharedBytes = size_t{1} << 26, kGlobalBytes = size_t{1} << 36;
constexpr size_t kPage = 4096;
unsigned char* arena = nullptr;
Cell* cells = nullptr;
size_t shared_used = 0, global_used = 0;
std::vector<std::vector<Record>> lists;
std::vector<uint32_t> unused_lists;

std::vector<Actor> actors;
size_t padded_block = 0;

// The last access of each thread, and of each thread's copies, to each other block's shared memory: that
// block must be known to be there still.
struct Visit {
    uint32_t epoch, stack;
};
std::vector<Visit> visits;
bool visited = false;
Actor* current = nullptr;
// Clusters are numbered as they come, those of stream 0 even, those of stream 1 odd.
uint32_t cluster = 0, launch_first = 2, launch_stream = 0;
uint32_t ended[2] = {};      // clusters up to here are ordered before everything
Line lines[2], launch_line;  // the streams' ends, and where the kernel that runs stands
bool started_next_early = false;

void* map(size_t bytes) {
    void* const at =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        std::fprintf(stderr, "emulator: no address space for the race detector\n");
        std::abort();
    }
    return at;
}

unsigned char* take(size_t& used, size_t offset, size_t limit, size_t bytes) {
    if (arena == nullptr) {
        arena = static_cast<unsigned char*>(map(kSharedBytes + kGlobalBytes));
        cells = static_cast<Cell*>(map((kSharedBytes + kGlobalBytes) / 4 * sizeof(Cell)));
    }
    bytes = (bytes + kPage - 1) / kPage * kPage;
    if (used + bytes > limit) {
        std::fprintf(stderr, "emulator: the race detector is out of addresses\n");
        std::abort();
    }
    unsigned char* const at = arena + offset + used;
    used += bytes;
    return at;
}

bool has_ended(const Record& r, const Actor& by) {  // of another cluster
    const uint32_t stream = r.cluster % 2;
    return r.cluster <= std::max(ended[stream], launch_line.from_the_start[stream]) ||
           (r.cluster <= launch_line.after_wait[stream] && (by.waited || by.clock->waited));
}

bool ordered(const Record& r, const Actor& by) {
    if (r.cluster != cluster) return has_ended(r, by);
    const uint32_t* const seen = by.clock->seen + r.warp * 32;
    uint32_t lanes = r.lanes;
    const uint32_t mine = 1u << by.id % 32;
    if (r.warp == by.id / 32) {
        lanes &= ~mine;
    } else if (r.warp == (by.id + actors_now) / 32 && (lanes & mine) != 0) {
        if (std::max(by.copied, seen[by.id % 32]) < r.epoch) return false;
        lanes &= ~mine;
    }
    for (; lanes != 0; lanes &= lanes - 1)
        if (seen[std::countr_zero(lanes)] < r.epoch) return false;
    return true;
}

bool conflict(Access a, Access b) {
    return a == Access::write || b == Access::write || a != b;
}

// ----------------------------------------------------------------------------------------------------------------
// reports

struct Race {
    std::string text;
    uint32_t now, before;  // stacks
};
std::vector<Race> found;
std::set<std::tuple<uint32_t, uint32_t, Access, Access>> reported;
bool is_quiet = false;
size_t printed = 0;

// A store of the value that is there already: whoever reads gets that value, whichever store came last
// (racecheck does not count it either). The value is known only after the call that announces the store.
struct Unsettled {
    const unsigned char* at;
    unsigned char value[4];
    Record before, now;
};
std::vector<Unsettled> unsettled;

const char* name(Access access) {
    return access == Access::read ? "read" : access == Access::write ? "write" : "atomic access";
}

std::string who(const Record& r) {
    char text[160];
    const size_t warps = actors_now / 32;
    const bool copy = r.warp >= warps;
    const size_t first = r.warp % warps * 32;
    const size_t block = first / padded_block;
    const size_t thread = first % padded_block + static_cast<size_t>(std::countr_zero(r.lanes));
    const char* const by = copy ? "an asynchronous copy of " : "";
    if (r.cluster == cluster)
        std::snprintf(text, sizeof text, "%sthread %zu of block %zu of the cluster", by, thread, block);
    else
        std::snprintf(text, sizeof text, "%s%s", by,
                      r.cluster >= launch_first ? "a block of another cluster"
                      : r.cluster % 2 == launch_stream
                          ? "an earlier kernel, for which grid_wait has not waited"
                          : "a kernel of another stream");
    return text;
}

void report(const void* at, const Record& before, const Record& now) {
    if (!reported.insert({before.stack, now.stack, before.access, now.access}).second) return;
    const size_t place = static_cast<size_t>(static_cast<const unsigned char*>(at) - arena);
    char text[480];
    std::snprintf(text, sizeof text, "%s by %s after %s by %s, in %s memory at %p", name(now.access),
                  who(now).c_str(), name(before.access), who(before).c_str(),
                  place < kSharedBytes ? "shared" : "global", at);
    found.push_back({text, now.stack, before.stack});
}

void report_late_visit(const Visit& visit, size_t actor, size_t block) {
    if (!reported.insert({0, visit.stack, Access::none, Access::none}).second) return;
    const size_t thread = actor % actors_now;
    char text[240];
    std::snprintf(
        text, sizeof text,
        "access by %sthread %zu of block %zu of the cluster to the shared memory of block %zu, which may "
        "have ended by then",
        actor >= actors_now ? "an asynchronous copy of " : "", thread % padded_block, thread / padded_block,
        block);
    found.push_back({text, visit.stack, 0});
}

void settle() {
    for (const Unsettled& u : unsettled) {
        bool same = true;
        for (int i = 0; i < 4; ++i)
            if ((u.before.bytes & u.now.bytes) >> i & 1) same &= u.at[i] == u.value[i];
        if (!same) report(u.at, u.before, u.now);
    }
    unsettled.clear();
}

// ----------------------------------------------------------------------------------------------------------------
// an access

void erase(Record* list, uint32_t& n, uint32_t i) {
    list[i] = list[--n];
    list[n].access = Access::none;
}

// Of accesses of other clusters that are still of interest one of a kind is enough: whoever comes later
// stands to all of them alike. The bytes are those of all.
bool absorb(Record* list, uint32_t n, const Record& old) {
    for (uint32_t i = 0; i < n; ++i) {
        Record& r = list[i];
        if (r.cluster == cluster || r.access != old.access ||
            (r.cluster >= launch_first) != (old.cluster >= launch_first) || r.cluster % 2 != old.cluster % 2)
            continue;
        const uint8_t bytes = r.bytes | old.bytes;
        if (old.cluster > r.cluster) r = old;
        r.bytes = bytes;
        return true;
    }
    return false;
}

void touch_cell(Cell& cell, const unsigned char* at, bool in_shared, Record now, const Actor& by) {
    Record* list = cell.first;
    uint32_t n = 0;
    if (cell.more != 0) {
        std::vector<Record>& all = lists[cell.more - 1];
        list = all.data();
        n = static_cast<uint32_t>(all.size());
    } else {
        while (n < 3 && list[n].access != Access::none) ++n;
    }
    Record* same = nullptr;
    for (uint32_t i = 0; i < n; ++i) {  // often the thread itself, once more
        const Record& r = list[i];
        if (r.cluster == now.cluster && r.epoch == now.epoch && r.warp == now.warp &&
            (r.lanes & now.lanes) != 0 && r.access == now.access && (r.bytes & now.bytes) == now.bytes &&
            now.warp < actors_now / 32)
            return;
    }
    for (uint32_t i = 0; i < n;) {
        Record& r = list[i];
        if (r.cluster != cluster && (in_shared || r.cluster <= ended[r.cluster % 2])) {
            erase(list, n, i);
            continue;
        }
        const bool overlap = (r.bytes & now.bytes) != 0;
        const bool before = ordered(r, by);
        if (overlap && !before && conflict(r.access, now.access)) {
            const bool copies = r.warp >= actors_now / 32 || now.warp >= actors_now / 32;
            if (r.access == Access::write && now.access == Access::write && !copies) {
                Unsettled& u = unsettled.emplace_back();
                u = {at, {}, r, now};
                std::memcpy(u.value, at, 4);
            } else {
                report(at, r, now);
                erase(list, n, i);
                continue;
            }
        }
        if (r.cluster != cluster) {
            const Record old = r;
            if (absorb(list, i, old))
                erase(list, n, i);
            else
                ++i;
            continue;
        }
        // what is ordered before this access, and conflicts with nothing that this one does not, may go
        const bool covered = (r.bytes & ~now.bytes) == 0;
        if (before && covered && (now.access == Access::write || now.access == r.access)) {
            erase(list, n, i);
            continue;
        }
        if (r.epoch == now.epoch && r.warp == now.warp && r.access == now.access && r.bytes == now.bytes)
            same = &r;
        ++i;
    }
    if (same != nullptr) same->lanes |= now.lanes;
    if (cell.more == 0 && (same != nullptr || n < 3)) {
        if (same == nullptr) list[n] = now;
        return;
    }
    if (cell.more == 0) {
        if (unused_lists.empty()) {
            lists.emplace_back();
            unused_lists.push_back(static_cast<uint32_t>(lists.size()));
        }
        cell.more = unused_lists.back();
        unused_lists.pop_back();
        lists[cell.more - 1].assign(list, list + n);
    }
    std::vector<Record>& all = lists[cell.more - 1];
    all.resize(n);
    if (same == nullptr) all.push_back(now);
    if (all.size() > 3) return;
    for (uint32_t i = 0; i < 3; ++i) cell.first[i] = i < all.size() ? all[i] : Record{};
    unused_lists.push_back(cell.more);
    cell.more = 0;
}

void touch_range(const void* pointer, size_t bytes, Access access, bool copy, const void* pc) {
    const auto* const begin = static_cast<const unsigned char*>(pointer);
    const size_t start = static_cast<size_t>(begin - arena);
    if (start >= kSharedBytes + kGlobalBytes) return;
    if (!unsettled.empty()) settle();
    Actor& by = *current;
    Record now{cluster,
               copy ? by.copies : by.epoch,
               by.stack.at(pc),
               1u << by.id % 32,
               static_cast<uint16_t>((copy ? by.id + actors_now : by.id) / 32),
               0,
               access};
    if (start < kSharedBytes && actors_now > padded_block) {
        const size_t block = start / (shared_used / (actors_now / padded_block));
        if (block != by.id / padded_block) {
            visits[block * 2 * actors_now + by.id + (copy ? actors_now : 0)] = {now.epoch, now.stack};
            visited = true;
        }
    }
    for (size_t place = start; place < start + bytes;) {
        const size_t first = place % 4, last = std::min<size_t>(4, first + start + bytes - place);
        now.bytes = static_cast<uint8_t>((1u << last) - (1u << first));
        touch_cell(cells[place / 4], arena + place / 4 * 4, start < kSharedBytes, now, by);
        place += last - first;
    }
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------
// what the emulator says

unsigned char* reserve_shared(size_t bytes) {
    return take(shared_used, 0, kSharedBytes, bytes);
}
unsigned char* reserve_global(size_t bytes) {
    return take(global_used, kSharedBytes, kGlobalBytes, bytes);
}
void forget_shared() {
    shared_used = 0;
}

void begin_launch(int stream) {
    launch_stream = static_cast<uint32_t>(stream);
    launch_first = cluster + 1;
    launch_line = lines[stream];
    started_next_early = false;
}

Line record_event(int stream) {
    return lines[stream];
}

void wait_event(int stream, const Line& event) {
    Line& line = lines[stream];
    for (int i = 0; i < 2; ++i) {
        line.after_wait[i] = std::max(line.after_wait[i], event.after_wait[i]);
        line.from_the_start[i] = std::max(line.from_the_start[i], event.from_the_start[i]);
    }
}

void begin_cluster(size_t blocks, size_t threads_per_block) {
    cluster += cluster % 2 == launch_stream ? 2 : 1;
    padded_block = (threads_per_block + 31) / 32 * 32;
    actors.clear();
    actors_now = padded_block * blocks;
    actors.resize(actors_now);
    if (blocks > 1) visits.assign(blocks * 2 * actors_now, Visit{});
    visited = false;
    const Ref nothing = new_clock();
    for (size_t i = 0; i < actors_now; ++i) {
        actors[i].id = static_cast<uint32_t>(i);
        actors[i].clock = nothing;
    }
}

void end_cluster() {
    settle();
    current = nullptr;
    if (!visited) return;
    for (size_t block = 0; block < actors_now / padded_block; ++block) {
        const Ref last = new_clock();   // what its threads knew when they ended
        const Clock* joined = nullptr;  // threads that met last have one clock
        for (size_t t = 0; t < padded_block; ++t) {
            const Clock* const clock = actor(block, t).clock.get();
            if (clock != joined) join(*last.get(), *clock);
            joined = clock;
        }
        for (size_t a = 0; a < 2 * actors_now; ++a) {
            const Visit& visit = visits[block * 2 * actors_now + a];
            if (visit.epoch > last->seen[a]) report_late_visit(visit, a, block);
        }
    }
}

void end_launch() {
    Line& line = lines[launch_stream];
    line.after_wait[launch_stream] = cluster;
    if (!started_next_early)
        std::copy(launch_line.after_wait, launch_line.after_wait + 2, line.from_the_start);
    if (is_quiet) return;
    for (; printed < found.size(); ++printed) {
        const Race& race = found[printed];
        const auto now = names_of(race.now), before = names_of(race.before);
        std::fprintf(stderr, "race: %s\n", race.text.c_str());
        for (const std::string& place : now) std::fprintf(stderr, "    %s\n", place.c_str());
        if (!before.empty()) std::fprintf(stderr, "  before:\n");
        for (const std::string& place : before) std::fprintf(stderr, "    %s\n", place.c_str());
    }
}

void order_streams() {
    ended[0] = ended[1] = cluster;
}

Actor& actor(size_t block, size_t thread) {
    return actors[block * padded_block + thread];
}

void run_as(Actor* a) {
    if (!unsettled.empty()) settle();
    current = a;
}

CallStack* running_stack() {
    return current == nullptr ? nullptr : &current->stack;
}

void touch_from(const void* at, size_t bytes, Access access, const void* pc) {
    if (current != nullptr) touch_range(at, bytes, access, false, pc);
}
void touch(const void* at, size_t bytes, Access access) {
    touch_from(at, bytes, access, __builtin_return_address(0));
}
void touch_as_copy(const void* at, size_t bytes, Access access, const void* pc) {
    if (current != nullptr) touch_range(at, bytes, access, true, pc);
}
uint32_t close_copies() {
    return current->copies++;
}
void wait_for_copies(uint32_t number) {
    current->copied = std::max(current->copied, number);
}
void grid_wait() {
    current->waited = true;
}
void grid_launch_next() {
    if (!current->waited && !current->clock->waited) started_next_early = true;
}

bool is_ignored(const std::source_location& place) {
    static const std::string without = [] {
        const char* const value = std::getenv("KDTREE_RACES_WITHOUT");
        return std::string(value == nullptr ? "" : value);
    }();
    if (without.empty()) return false;
    const std::string here = std::string(place.file_name()) + ":" + std::to_string(place.line());
    return here.ends_with("/" + without);
}

std::vector<std::string> take() {
    std::vector<std::string> all;
    for (Race& race : found) all.push_back(std::move(race.text));
    found.clear();
    reported.clear();
    printed = 0;
    return all;
}

void quiet(bool yes) {
    is_quiet = yes;
}

}  // namespace kdt_emulator::races
