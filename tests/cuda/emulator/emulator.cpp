// The machine behind cuda_runtime.h: fibers, barriers, guarded memory. One cluster of blocks runs at a time.
#include <cuda_runtime.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <vector>

#include "races.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace kdt_emulator {

struct Thread;

namespace {

Thread* current = nullptr;

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kMostIdlePasses = 100000;

[[noreturn]] void die(const char* what) {
    std::fprintf(stderr, "emulator: %s (block %u %u %u, thread %u)\n", what, blockIdx.x, blockIdx.y,
                 blockIdx.z, threadIdx.x);
    std::abort();
}

enum class Space { shared, global };

// Memory that ends at a page that cannot be touched, filled with NaN.
struct Guarded {
    unsigned char* map = nullptr;
    size_t map_bytes = 0;
    unsigned char* data = nullptr;

    Guarded(size_t bytes, size_t alignment, Space space) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t body = (bytes + alignment - 1) / alignment * alignment;
        map_bytes = (body + page - 1) / page * page + 2 * page;
        void* const place = place_for(space, map_bytes);
        map = static_cast<unsigned char*>(
            mmap(place, map_bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | (place != nullptr ? MAP_FIXED : 0), -1, 0));
        if (map == MAP_FAILED) die("out of memory");
        mprotect(map, page, PROT_NONE);
        mprotect(map + map_bytes - page, page, PROT_NONE);
        data = map + map_bytes - page - body;
        std::memset(data, 0xFF, body);
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() {
        if (place_is_chosen)  // nobody else may get the address
            mmap(map, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        else
            munmap(map, map_bytes);
    }

#if defined(KDT_RACES)
    static constexpr bool place_is_chosen = true;
    static void* place_for(Space space, size_t bytes) {
        return space == Space::shared ? races::reserve_shared(bytes) : races::reserve_global(bytes);
    }
#else
    static constexpr bool place_is_chosen = false;
    static void* place_for(Space, size_t) { return nullptr; }
#endif
};

struct Barrier {
    unsigned generation = 0;
    int arrived = 0;
    races::Meeting meeting;
};

struct WarpState {
    Barrier barrier;
    Collective op = nullptr;
    uint32_t present = 0;
    int live = 0;
    unsigned char in[32][64], out[32][64];
};

struct Block {
    dim3 index;
    unsigned rank = 0;
    int live = 0;
    Barrier barrier;
    std::source_location place;  // where those are who wait at it
    std::unique_ptr<Guarded> shared;
    std::vector<WarpState> warps;
};

struct Copy {
    unsigned char* to;
    unsigned char data[16];
};

// An mbarrier, in the eight bytes of shared memory that a kernel gives it.
struct MemoryBarrier {
    uint16_t count, missing;
    int16_t bytes;  // that stores have yet to bring
    uint8_t phase, magic;
};
constexpr uint8_t kMagic = 0xBA;

// What one thread has sent on its way to a barrier: copies, of which it arrives when they land, or stores, of
// which the barrier awaits the bytes.
struct Delivery {
    std::vector<Copy> copies;
    bool arrives;
    races::Actor* sender;
    uint32_t number;  // of the copies, for the race detector
};

struct Group {
    std::vector<Copy> copies;
    uint32_t number = 0;
};

}  // namespace

struct Thread {
    unsigned index = 0;  // in its block
    Block* block = nullptr;
    int lane = 0;
    WarpState* warp = nullptr;
    bool started = false, finished = false, waited = false;
    jmp_buf jump;
    ucontext_t start;
    unsigned char* stack = nullptr;
    races::Actor* actor = nullptr;
    std::vector<Group> groups{1};
};

namespace {

std::vector<Block> blocks;
std::vector<std::unique_ptr<Thread>> threads;
std::vector<unsigned char*> stacks;
Barrier cluster;
int cluster_live = 0;
std::map<MemoryBarrier*, std::vector<Delivery>> deliveries;  // made when somebody waits at the barrier
std::map<MemoryBarrier*, races::Meeting> meetings;
jmp_buf scheduler;
const std::function<void()>* body = nullptr;
bool progress = false;

void yield() {
    Thread* self = current;
    if (_setjmp(self->jump) == 0) _longjmp(scheduler, 1);
}

// Arrives and waits for everybody; true in the last one, which must call `open` when its work is done.
bool arrive(Barrier& barrier, int expected) {
    return ++barrier.arrived >= expected;
}

void open(Barrier& barrier) {
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.meeting.finish();
    progress = true;
}

void wait(Barrier& barrier, int expected, const std::source_location& place) {
    const unsigned generation = barrier.generation;
    const bool orders = !races::is_ignored(place);
    if (orders) barrier.meeting.arrive(*current->actor);
    if (arrive(barrier, expected)) open(barrier);
    while (barrier.generation == generation) yield();
    if (orders) barrier.meeting.acquire(*current->actor, true);
}

void enter() {
    (*body)();
    Thread* self = current;
    if (!self->waited) die("a thread ended without ptx::grid_wait");
    for (const auto& group : self->groups)
        if (!group.copies.empty()) die("a thread ended with an asynchronous copy in flight");
    self->finished = true;
    progress = true;
    if (self->warp->barrier.arrived > 0) die("a lane ended while others of its warp wait for it");
    --self->warp->live;
    --self->block->live;
    --cluster_live;
    if (self->block->live > 0 && self->block->barrier.arrived >= self->block->live)
        open(self->block->barrier);
    _longjmp(scheduler, 1);
}

void resume(Thread& thread) {
    current = &thread;
    races::run_as(thread.actor);
    threadIdx = dim3(thread.index);
    blockIdx = thread.block->index;
    if (_setjmp(scheduler) != 0) return;
    if (thread.started) _longjmp(thread.jump, 1);
    thread.started = true;
    setcontext(&thread.start);
}

void run_cluster(dim3 first, unsigned size, dim3 block, size_t shared_bytes) {
    blocks.clear();
    blocks.resize(size);
    meetings.clear();
    const size_t count = block.x;
    races::forget_shared();
    races::begin_cluster(size, count);
    cluster = Barrier{};
    cluster_live = static_cast<int>(count * size);
    threads.clear();
    for (unsigned b = 0; b < size; ++b) {
        Block& to = blocks[b];
        to.index = dim3(first.x + b, first.y, first.z);
        to.rank = b;
        to.live = static_cast<int>(count);
        to.shared = std::make_unique<Guarded>(shared_bytes, 128, Space::shared);
        to.warps.resize((count + 31) / 32);
        for (size_t t = 0; t < count; ++t) {
            auto thread = std::make_unique<Thread>();
            thread->index = static_cast<unsigned>(t);
            thread->block = &to;
            thread->warp = &to.warps[t / 32];
            thread->lane = static_cast<int>(t % 32);
            thread->actor = &races::actor(b, t);
            ++thread->warp->live;
            const size_t index = threads.size();
            if (index == stacks.size()) {
                void* stack =
                    mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (stack == MAP_FAILED) die("out of memory for stacks");
                stacks.push_back(static_cast<unsigned char*>(stack));
            }
            getcontext(&thread->start);
            thread->start.uc_stack.ss_sp = stacks[index];
            thread->start.uc_stack.ss_size = kStackBytes;
            thread->start.uc_link = nullptr;
            makecontext(&thread->start, enter, 0);
            threads.push_back(std::move(thread));
        }
    }
    size_t left = threads.size();
    int idle = 0;
    while (left > 0) {
        progress = false;
        left = 0;
        for (auto& thread : threads) {
            if (thread->finished) continue;
            const bool first_time = !thread->started;
            resume(*thread);
            progress |= first_time;
            left += !thread->finished;
        }
        idle = progress ? 0 : idle + 1;
        if (idle > kMostIdlePasses) die("deadlock");
    }
    races::end_cluster();
    if (!deliveries.empty()) die("a block ended with an asynchronous copy in flight");
}

MemoryBarrier* memory_barrier(void* at) {
    auto* const barrier = static_cast<MemoryBarrier*>(at);
    if (barrier->magic != kMagic) die("a barrier that was not initialised");
    return barrier;
}

void advance(MemoryBarrier& barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    barrier.missing = barrier.count;
    ++barrier.phase;
    meetings[&barrier].finish();
    progress = true;
}

void arrive(MemoryBarrier& barrier) {
    if (barrier.missing == 0) die("more arrivals at a barrier than it counts");
    --barrier.missing;
    advance(barrier);
}

void deliver(MemoryBarrier* barrier) {
    const auto found = deliveries.find(barrier);
    if (found == deliveries.end()) return;
    const std::vector<Delivery> all = std::move(found->second);
    deliveries.erase(found);
    for (const Delivery& d : all) {
        for (const Copy& copy : d.copies) std::memcpy(copy.to, copy.data, 16);
        meetings[barrier].bring(*d.sender, d.number);
        if (d.arrives) {
            arrive(*barrier);
            continue;
        }
        barrier->bytes = static_cast<int16_t>(barrier->bytes - static_cast<int>(d.copies.size() * 16));
        advance(*barrier);
    }
}

}  // namespace

void block_barrier(const std::source_location& place) {
    Block& block = *current->block;
    if (block.barrier.arrived == 0)
        block.place = place;
    else if (block.place.line() != place.line() ||
             std::strcmp(block.place.file_name(), place.file_name()) != 0)
        die("threads of a block meet at its barrier from two places of the code");
    wait(block.barrier, block.live, place);
}

void cluster_barrier(const std::source_location& place) {
    wait(cluster, cluster_live, place);
}

void note_grid_wait(const std::source_location& place) {
    current->waited = true;
    if (!races::is_ignored(place)) races::grid_wait();
}

void note_launch_next() {
    races::grid_launch_next();
}

unsigned char* shared_memory() {
    return current->block->shared->data;
}

const void* cluster_address(const void* mine, unsigned rank) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(mine) - current->block->shared->data;
    if (rank >= blocks.size()) die("no such block in the cluster");
    return blocks[rank].shared->data + offset;
}

void copy_async(void* to, const void* from, bool valid) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        die("an asynchronous copy that is not 16-byte aligned");
    Copy copy{static_cast<unsigned char*>(to), {}};
    const void* const pc = __builtin_return_address(0);
    if (valid) {
        std::memcpy(copy.data, from, 16);
        races::touch_as_copy(from, 16, races::Access::read, pc);
    }
    races::touch_as_copy(to, 16, races::Access::write, pc);
    std::memset(to, 0xFF, 16);
    current->groups.back().copies.push_back(copy);
}

void copy_async_commit() {
    current->groups.back().number = races::close_copies();
    current->groups.emplace_back();
}

void copy_async_wait(int pending, const std::source_location& place) {
    auto& groups = current->groups;  // the last one is open
    const size_t finished = groups.size() - 1 > static_cast<size_t>(pending)
                                ? groups.size() - 1 - static_cast<size_t>(pending)
                                : 0;
    for (size_t i = 0; i < finished; ++i) {
        for (const Copy& copy : groups[i].copies) std::memcpy(copy.to, copy.data, 16);
        if (!races::is_ignored(place)) races::wait_for_copies(groups[i].number);
    }
    groups.erase(groups.begin(), groups.begin() + static_cast<ptrdiff_t>(finished));
}

void copy_async_arrive(void* at, const std::source_location& place) {
    races::touch_from(at, 8, races::Access::atomic, __builtin_return_address(0));
    Delivery delivery{{}, true, current->actor, races::close_copies()};
    if (races::is_ignored(place)) delivery.number = 0;
    for (auto& group : current->groups)
        delivery.copies.insert(delivery.copies.end(), group.copies.begin(), group.copies.end());
    current->groups.assign(1, {});
    deliveries[memory_barrier(at)].push_back(std::move(delivery));
}

void bulk_copy(void* to, const void* from, int bytes, void* at) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 ||
        bytes % 16 != 0)
        die("a bulk copy that is not 16-byte aligned");
    const void* const pc = __builtin_return_address(0);
    races::touch_from(at, 8, races::Access::atomic, pc);
    races::touch_as_copy(from, static_cast<size_t>(bytes), races::Access::read, pc);
    races::touch_as_copy(to, static_cast<size_t>(bytes), races::Access::write, pc);
    Delivery delivery{{}, false, current->actor, races::close_copies()};
    for (int i = 0; i < bytes; i += 16) {
        Copy copy{static_cast<unsigned char*>(to) + i, {}};
        std::memcpy(copy.data, static_cast<const unsigned char*>(from) + i, 16);
        std::memset(copy.to, 0xFF, 16);
        delivery.copies.push_back(copy);
    }
    deliveries[memory_barrier(at)].push_back(std::move(delivery));
}

void store_async(void* to, const void* from, void* at) {
    if (reinterpret_cast<uintptr_t>(to) % 16 != 0) die("an asynchronous store that is not 16-byte aligned");
    Copy copy{static_cast<unsigned char*>(to), {}};
    std::memcpy(copy.data, from, 16);
    const void* const pc = __builtin_return_address(0);
    races::touch_from(at, 8, races::Access::atomic, pc);
    races::touch_as_copy(to, 16, races::Access::write, pc);
    std::memset(to, 0xFF, 16);
    deliveries[memory_barrier(at)].push_back({{copy}, false, current->actor, races::close_copies()});
}

void barrier_init(void* at, int count) {
    if (reinterpret_cast<uintptr_t>(at) % 8 != 0) die("a barrier that is not 8-byte aligned");
    if (count < 1 || count > 65535) die("a barrier for no thread or for more than 65535");
    const auto n = static_cast<uint16_t>(count);
    races::touch_from(at, 8, races::Access::write, __builtin_return_address(0));
    auto* const barrier = static_cast<MemoryBarrier*>(at);
    *barrier = {n, n, 0, 0, kMagic};
    meetings[barrier] = races::Meeting();
}

void barrier_arrive(void* at, int bytes, const std::source_location& place) {
    MemoryBarrier* const barrier = memory_barrier(at);
    barrier->bytes = static_cast<int16_t>(barrier->bytes + bytes);
    races::touch_from(at, 8, races::Access::atomic, __builtin_return_address(0));
    if (!races::is_ignored(place)) meetings[barrier].arrive(*current->actor);
    arrive(*barrier);
}

void barrier_wait(void* at, int parity, const std::source_location& place) {
    MemoryBarrier* const barrier = memory_barrier(at);
    races::touch_from(at, 8, races::Access::atomic, __builtin_return_address(0));
    for (deliver(barrier); barrier->phase % 2 == parity; deliver(barrier)) yield();
    if (!races::is_ignored(place)) meetings[barrier].acquire(*current->actor, false);
}

void warp_collective(Collective compute, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     bool orders_memory) {
    Thread& self = *current;
    WarpState& warp = *self.warp;
    const size_t lane = static_cast<size_t>(self.lane);
    if (warp.barrier.arrived == 0) {
        warp.op = compute;
        warp.present = 0;
    } else if (warp.op != compute) {
        die("lanes of a warp met at different instructions");
    }
    warp.present |= 1u << self.lane;
    std::memset(warp.in[lane], 0, 64);
    std::memcpy(warp.in[lane], in, in_bytes);
    const unsigned generation = warp.barrier.generation;
    if (orders_memory) warp.barrier.meeting.arrive(*self.actor);
    if (arrive(warp.barrier, warp.live)) {
        compute({warp.in, warp.out, warp.present});
        open(warp.barrier);
    }
    while (warp.barrier.generation == generation) yield();
    if (orders_memory) warp.barrier.meeting.acquire(*self.actor, true);
    std::memcpy(out, warp.out[lane], out_bytes);
}

void run(int stream, dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster_size,
         const std::function<void()>& kernel) {
    if (grid.x % cluster_size != 0) die("a grid that is no whole number of clusters");
    if (grid.y > 65535 || grid.z > 65535) die("a grid that is too large");
    if (shared_bytes > 101376) die("more shared memory than sm_120 has");
    body = &kernel;
    blockDim = block;
    gridDim = grid;
    races::begin_launch(stream);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; x += cluster_size)
                run_cluster(dim3(x, y, z), cluster_size, block, shared_bytes);
    races::end_launch();
}

}  // namespace kdt_emulator

// ----------------------------------------------------------------------------------------------------------------
// runtime

struct CudaGraph {
    std::vector<std::function<void()>> work;
};

struct CudaEvent {
    kdt_emulator::races::Line line;
};

namespace {
std::map<void*, std::unique_ptr<kdt_emulator::Guarded>> allocations;
std::unique_ptr<CudaGraph> recording;
}  // namespace

void kdt_emulator::queue(std::function<void()> work) {
    if (recording)
        recording->work.push_back(std::move(work));
    else
        work();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    recording = std::make_unique<CudaGraph>();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    *graph = recording.release();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CudaGraph(*graph);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    for (const auto& work : exec->work) work();
    return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) {
    return "an emulated error";
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    auto memory = std::make_unique<kdt_emulator::Guarded>(bytes, 256, kdt_emulator::Space::global);
    *pointer = memory->data;
    allocations[*pointer] = std::move(memory);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
    *pointer = std::malloc(bytes);
    return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) {
    std::free(pointer);
    return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
    allocations.erase(pointer);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *free = *total = size_t{8} << 30;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    kdt_emulator::queue([=] {
        std::memcpy(to, from, bytes);
        kdt_emulator::races::order_streams();
    });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
    kdt_emulator::queue([=] {
        std::memset(to, byte, bytes);
        kdt_emulator::races::order_streams();
    });
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {"emulated GPU", 9, 0, 1, size_t{8} << 30, 50 << 20, 232448};
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    static uintptr_t made = 0;
    *stream = reinterpret_cast<cudaStream_t>(++made);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    kdt_emulator::races::order_streams();
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CudaEvent;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    kdt_emulator::queue(
        [=] { event->line = kdt_emulator::races::record_event(kdt_emulator::stream_number(stream)); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event) {
    kdt_emulator::queue(
        [=] { kdt_emulator::races::wait_event(kdt_emulator::stream_number(stream), event->line); });
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
    *clusters = 1;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
    return cudaSuccess;
}
