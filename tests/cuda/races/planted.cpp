// The race detector judged: small kernels with one fault each, which must be reported, beside the same kernel
// without it, which must not. And what makes a race anywhere fail the case in which it happened.
#include <cuda_runtime.h>

#include "../kernels/testing.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/ptx.h"

namespace kdt::testing {

namespace {

namespace races = kdt_emulator::races;
namespace ptx = cuda::ptx;

std::string races_of_a_case() {
    const size_t n = races::take().size();
    return n == 0 ? std::string() : format("%zu data races", n);
}
[[maybe_unused]] const bool installed = (set_after_case(races_of_a_case), true);

int* words() {  // global memory
    static int* const memory = [] {
        void* p = nullptr;
        cudaMalloc(&p, 4096);
        return static_cast<int*>(p);
    }();
    return memory;
}

struct Shape {
    int threads = 64;
    unsigned blocks = 1;
    int cluster = 1;
};

template <auto Kernel>
void start(const Shape& s, cudaStream_t stream = nullptr) {
    cuda::launch<Kernel>({stream, 0, "planted", dim3(s.blocks), s.threads, 4096, s.cluster}, words());
}

template <auto Kernel>
std::vector<std::string> reports_of(const Shape& s) {
    cudaMemsetAsync(words(), 0, 4096, nullptr);
    races::quiet(true);
    start<Kernel>(s);
    races::quiet(false);
    return races::take();
}

// `part` is in the first report of the faulty kernel; `right` has none.
template <auto Faulty, auto Right>
void judge(const char* part, const Shape& s = {}) {
    const auto wrong = reports_of<Faulty>(s), none = reports_of<Right>(s);
    count_checks(2);
    if (wrong.empty()) failed("the planted race was not reported");
    if (wrong[0].find(part) == std::string::npos)
        failed("the report is '%s'; '%s' was expected in it", wrong[0].c_str(), part);
    if (!none.empty()) failed("the right kernel was reported: %s", none[0].c_str());
}

int* shared_ints() {
    return reinterpret_cast<int*>(ptx::shared_memory() + 256);
}
uint32_t barrier_at(int i) {
    return ptx::shared_address(ptx::shared_memory()) + 8 * static_cast<uint32_t>(i);
}
int thread_index() {
    return static_cast<int>(threadIdx.x);
}

// ----------------------------------------------------------------------------------------------------------------
// a warp

enum class Between { nothing, shuffle, vote, syncwarp };

template <Between B>
void neighbours_in_a_warp(int*) {
    ptx::grid_wait();
    const int lane = thread_index();
    shared_ints()[lane] = lane;
    if (B == Between::shuffle) __shfl_sync(0xFFFFFFFFu, lane, 0);
    if (B == Between::vote) __any_sync(0xFFFFFFFFu, lane == 0);
    if (B == Between::syncwarp) __syncwarp();
    volatile int sum = shared_ints()[(lane + 1) % 32];
    (void)sum;
}

// Rows written by lanes, read by ldmatrix: the instruction itself orders nothing.
template <bool Sync>
void fragments_of_a_warp(int*) {
    ptx::grid_wait();
    for (int i = 0; i < 4; ++i) shared_ints()[i * 32 + thread_index()] = i;
    if (Sync) __syncwarp();
    uint32_t r[4];
    ptx::ldmatrix_x4(r, ptx::shared_address(shared_ints()) + static_cast<uint32_t>(thread_index()) * 16);
}

// ----------------------------------------------------------------------------------------------------------------
// a block

template <bool Sync>
void neighbours_in_a_block(int*) {
    ptx::grid_wait();
    shared_ints()[thread_index()] = 1;
    if (Sync) __syncthreads();
    volatile int x = shared_ints()[(thread_index() + 32) % 64];
    (void)x;
}

// The second round overwrites what the first one's readers may still read.
template <bool Sync>
void two_rounds_of_a_block(int*) {
    ptx::grid_wait();
    for (int round = 0; round < 2; ++round) {
        shared_ints()[thread_index()] = round;
        __syncthreads();
        volatile int x = shared_ints()[63 - thread_index()];
        (void)x;
        if (Sync) __syncthreads();
    }
}

// One value from all is that value, whoever was last; a reader beside them is another matter.
enum class Flag { thread_numbers, ones, ones_and_a_reader };

template <Flag F>
void one_flag_of_a_block(int*) {
    ptx::grid_wait();
    if (F == Flag::ones_and_a_reader && thread_index() == 63) {
        volatile int x = shared_ints()[0];
        (void)x;
    } else {
        shared_ints()[0] = F == Flag::thread_numbers ? thread_index() : 1;
    }
}

template <bool Atomic>
void one_counter_of_a_block(int*) {
    ptx::grid_wait();
    if (thread_index() == 0) shared_ints()[0] = 0;
    __syncthreads();
    if (Atomic)
        atomicAdd(shared_ints(), 1);
    else
        ++shared_ints()[0];
}

// ----------------------------------------------------------------------------------------------------------------
// mbarriers

// Warp 0 fills, one lane of it arrives for all, warp 1 reads.
template <bool Sync>
void one_lane_arrives(int*) {
    ptx::grid_wait();
    if (thread_index() == 0) ptx::barrier_init(barrier_at(0), 1);
    __syncthreads();
    const int lane = thread_index() % 32;
    if (thread_index() < 32) {
        shared_ints()[lane] = lane;
        if (Sync) __syncwarp();
        if (lane == 0) ptx::barrier_arrive(barrier_at(0));
    } else {
        ptx::barrier_wait(barrier_at(0), 0);
        volatile int x = shared_ints()[31 - lane];
        (void)x;
    }
}

template <bool Sync>
void barrier_used_at_once(int*) {
    ptx::grid_wait();
    if (thread_index() == 0) ptx::barrier_init(barrier_at(0), 64);
    if (Sync) __syncthreads();
    ptx::barrier_arrive(barrier_at(0));
    ptx::barrier_wait(barrier_at(0), 0);
    __syncthreads();
}

// A ring of one slot: the reader frees it, the writer fills it again.
template <bool ReadFirst>
void ring_of_one(int*) {
    ptx::grid_wait();
    if (thread_index() == 0) {
        ptx::barrier_init(barrier_at(0), 32);
        ptx::barrier_init(barrier_at(1), 32);
    }
    __syncthreads();
    const int lane = thread_index() % 32;
    for (int step = 0; step < 4; ++step) {
        if (thread_index() < 32) {
            if (step > 0) ptx::barrier_wait(barrier_at(1), (step - 1) % 2);
            shared_ints()[lane] = step;
            ptx::barrier_arrive(barrier_at(0));
        } else {
            ptx::barrier_wait(barrier_at(0), step % 2);
            if (!ReadFirst) ptx::barrier_arrive(barrier_at(1));
            volatile int x = shared_ints()[31 - lane];
            (void)x;
            if (ReadFirst) ptx::barrier_arrive(barrier_at(1));
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------
// asynchronous copies

enum class Use { own_unwaited, own_waited, others_waited_by_them, others_after_barrier };

template <Use U>
void use_of_a_copy(int* global) {
    ptx::grid_wait();
    const int t = thread_index();
    ptx::copy_async_16(ptx::shared_address(shared_ints()) + static_cast<uint32_t>(t) * 16, global + t * 4);
    ptx::copy_async_commit();
    if (U != Use::own_unwaited) ptx::copy_async_wait<0>();
    if (U == Use::others_after_barrier) __syncthreads();
    const int from = U == Use::own_unwaited || U == Use::own_waited ? t : 63 - t;
    volatile int x = shared_ints()[from * 4];
    (void)x;
    ptx::copy_async_wait<0>();
}

template <bool Wait>
void copies_that_arrive(int* global) {
    ptx::grid_wait();
    if (thread_index() == 0) ptx::barrier_init(barrier_at(0), 64);
    __syncthreads();
    const int t = thread_index();
    ptx::copy_async_16(ptx::shared_address(shared_ints()) + static_cast<uint32_t>(t) * 16, global + t * 4);
    ptx::copy_async_arrive(barrier_at(0));
    if (Wait) ptx::barrier_wait(barrier_at(0), 0);
    volatile int x = shared_ints()[(63 - t) * 4];
    (void)x;
    if (!Wait) ptx::barrier_wait(barrier_at(0), 0);
}

// A thread's own writes do not travel with its copies' arrival.
template <bool ArriveToo>
void arrival_of_copies_alone(int* global) {
    ptx::grid_wait();
    if (thread_index() == 0) ptx::barrier_init(barrier_at(0), ArriveToo ? 64 : 32);
    __syncthreads();
    const int t = thread_index();
    if (t < 32) {
        ptx::copy_async_16(ptx::shared_address(shared_ints()) + static_cast<uint32_t>(t) * 16,
                           global + t * 4);
        shared_ints()[512 + t] = t;
        ptx::copy_async_arrive(barrier_at(0));
        if (ArriveToo) ptx::barrier_arrive(barrier_at(0));
    } else {
        ptx::barrier_wait(barrier_at(0), 0);
        volatile int x = shared_ints()[512 + t - 32];
        (void)x;
    }
}

template <bool Wait>
void bulk_copy_read(int* global) {
    ptx::grid_wait();
    if (thread_index() == 0) {
        ptx::barrier_init(barrier_at(0), 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (thread_index() == 0) {
        ptx::barrier_arrive_expecting(barrier_at(0), 256);
        ptx::bulk_copy(ptx::shared_address(shared_ints()), global, 256, barrier_at(0));
    }
    if (Wait) ptx::barrier_wait(barrier_at(0), 0);
    volatile int x = shared_ints()[thread_index()];
    (void)x;
    if (!Wait) ptx::barrier_wait(barrier_at(0), 0);
}

// ----------------------------------------------------------------------------------------------------------------
// clusters

template <bool Wait>
void store_to_the_other_block(int*) {
    ptx::grid_wait();
    if (thread_index() == 0) ptx::barrier_init(barrier_at(0), 1);
    ptx::cluster_sync();
    const uint32_t other = 1 - blockIdx.x % 2;
    if (thread_index() == 0) ptx::barrier_arrive_expecting(barrier_at(0), 64 * 16);
    ptx::cluster_store_async(ptx::shared_address(shared_ints()) + static_cast<uint32_t>(thread_index()) * 16,
                             make_float4(1, 2, 3, 4), barrier_at(0), other);
    if (Wait) ptx::barrier_wait(barrier_at(0), 0);
    volatile int x = shared_ints()[thread_index()];
    (void)x;
    if (!Wait) ptx::barrier_wait(barrier_at(0), 0);
    ptx::cluster_sync();
}

// __syncthreads meets one block, not the cluster.
template <bool Cluster>
void word_of_the_other_block(int*) {
    ptx::grid_wait();
    shared_ints()[thread_index()] = 1;
    if (Cluster)
        ptx::cluster_sync();
    else
        __syncthreads();
    volatile uint32_t x = ptx::cluster_load_word(shared_ints() + thread_index(), 1 - blockIdx.x % 2);
    (void)x;
    ptx::cluster_sync();
}

// A block's shared memory is gone when it ends, whoever still reads it.
template <bool Stay>
void visit_at_the_end(int*) {
    ptx::grid_wait();
    shared_ints()[thread_index()] = 1;
    ptx::cluster_sync();
    volatile uint32_t x = ptx::cluster_load_word(shared_ints() + thread_index(), 1 - blockIdx.x % 2);
    (void)x;
    if (Stay) ptx::cluster_sync();
}

// ----------------------------------------------------------------------------------------------------------------
// a grid, and kernels in a stream

enum class Word { same, own, counted };

template <Word W>
void blocks_write(int* global) {
    ptx::grid_wait();
    if (thread_index() != 0) return;
    if (W == Word::counted)
        atomicAdd(global, 1);
    else
        global[W == Word::own ? blockIdx.x : 0] = static_cast<int>(blockIdx.x);
}

// Bytes of one word are places of their own.
template <bool Own>
void blocks_write_bytes(int* global) {
    ptx::grid_wait();
    if (thread_index() == 0)
        reinterpret_cast<unsigned char*>(global)[Own ? blockIdx.x : blockIdx.x / 2] =
            static_cast<unsigned char>(1 + blockIdx.x);
}

void writer(int* global) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    if (blockIdx.x == 0) global[thread_index()] = 1;
}

template <bool Wait>
void reader(int* global) {
    if (Wait) ptx::grid_wait();
    volatile int x = global[thread_index()];
    (void)x;
    ptx::grid_wait();
}

// An unrelated kernel between them changes nothing: it too may wait for the writer.
void bystander(int*) {
    ptx::grid_launch_next();
    ptx::grid_wait();
}

// One that waits before it lets the next start: what it waited for, the next may read at once; what it wrote
// itself not.
template <bool WaitFirst, bool Writes>
void patient(int* global) {
    if (!WaitFirst) ptx::grid_launch_next();
    ptx::grid_wait();
    if (WaitFirst) ptx::grid_launch_next();
    if (Writes && blockIdx.x == 0) global[thread_index()] = 2;
}

template <bool WaitFirst, bool Writes>
std::vector<std::string> read_after_two() {
    cudaMemsetAsync(words(), 0, 4096, nullptr);
    races::quiet(true);
    start<writer>({});
    start<patient<WaitFirst, Writes>>({});
    start<reader<false>>({});
    races::quiet(false);
    return races::take();
}

// A kernel writes on the first stream, another reads on the second, or the other way round.
enum class Order { nothing, fork, join };

std::vector<std::string> read_on_another_stream(Order order, bool record_too_early) {
    cudaStream_t first = nullptr, second = nullptr;
    cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    cudaEvent_t event = nullptr;
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaMemsetAsync(words(), 0, 4096, first);
    races::quiet(true);
    const bool join = order == Order::join;
    if (record_too_early) cudaEventRecord(event, join ? second : first);
    start<writer>({}, join ? second : first);
    if (!record_too_early) cudaEventRecord(event, join ? second : first);
    if (order != Order::nothing) cudaStreamWaitEvent(join ? first : second, event);
    start<reader<true>>({}, join ? first : second);
    races::quiet(false);
    cudaEventDestroy(event);
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    return races::take();
}

template <bool Wait>
std::vector<std::string> read_after_write(bool between, bool synchronise) {
    cudaMemsetAsync(words(), 0, 4096, nullptr);
    races::quiet(true);
    start<writer>({});
    if (between) start<bystander>({});
    if (synchronise) cudaStreamSynchronize(nullptr);
    start<reader<Wait>>({});
    races::quiet(false);
    return races::take();
}

}  // namespace

KDT_CASE(planted_races_of_a_warp) {
    judge<neighbours_in_a_warp<Between::nothing>, neighbours_in_a_warp<Between::syncwarp>>("shared", {32});
    judge<neighbours_in_a_warp<Between::shuffle>, neighbours_in_a_warp<Between::syncwarp>>("shared", {32});
    judge<neighbours_in_a_warp<Between::vote>, neighbours_in_a_warp<Between::syncwarp>>("shared", {32});
    judge<fragments_of_a_warp<false>, fragments_of_a_warp<true>>("read by thread", {32});
}

KDT_CASE(planted_races_of_a_block) {
    judge<neighbours_in_a_block<false>, neighbours_in_a_block<true>>("shared");
    judge<two_rounds_of_a_block<false>, two_rounds_of_a_block<true>>("read by thread");
    judge<one_flag_of_a_block<Flag::thread_numbers>, one_flag_of_a_block<Flag::ones>>(
        "after write by thread");
    judge<one_flag_of_a_block<Flag::ones_and_a_reader>, one_flag_of_a_block<Flag::ones>>("read by thread 63");
    judge<one_counter_of_a_block<false>, one_counter_of_a_block<true>>("shared");
}

KDT_CASE(planted_races_around_mbarriers) {
    judge<one_lane_arrives<false>, one_lane_arrives<true>>("after write by thread");
    judge<barrier_used_at_once<false>, barrier_used_at_once<true>>("atomic access by thread");
    judge<ring_of_one<false>, ring_of_one<true>>("shared");
}

KDT_CASE(planted_races_with_asynchronous_copies) {
    const char* const copy = "after write by an asynchronous copy of thread";
    judge<use_of_a_copy<Use::own_unwaited>, use_of_a_copy<Use::own_waited>>(copy);
    judge<use_of_a_copy<Use::others_waited_by_them>, use_of_a_copy<Use::others_after_barrier>>(
        "copy of thread");
    judge<copies_that_arrive<false>, copies_that_arrive<true>>("copy of thread");
    judge<arrival_of_copies_alone<false>, arrival_of_copies_alone<true>>("after write by thread");
    judge<bulk_copy_read<false>, bulk_copy_read<true>>("copy of thread");
}

KDT_CASE(planted_races_in_a_cluster) {
    judge<store_to_the_other_block<false>, store_to_the_other_block<true>>("copy of thread", {64, 4, 2});
    judge<word_of_the_other_block<false>, word_of_the_other_block<true>>("shared", {64, 4, 2});
    judge<visit_at_the_end<false>, visit_at_the_end<true>>("which may have ended", {64, 4, 2});
}

KDT_CASE(planted_races_of_a_grid) {
    judge<blocks_write<Word::same>, blocks_write<Word::own>>("a block of another cluster", {32, 3});
    judge<blocks_write<Word::same>, blocks_write<Word::counted>>("global", {32, 3});
    judge<blocks_write_bytes<false>, blocks_write_bytes<true>>("global", {32, 4});
}

KDT_CASE(planted_races_with_an_earlier_kernel) {
    count_checks(4);
    for (const bool between : {false, true}) {
        const auto wrong = read_after_write<false>(between, false);
        if (wrong.empty() || wrong[0].find("an earlier kernel") == std::string::npos)
            failed("a read before grid_wait of what an earlier kernel wrote was not reported");
        if (const auto none = read_after_write<true>(between, false); !none.empty())
            failed("a read after grid_wait was reported: %s", none[0].c_str());
    }
    if (const auto none = read_after_write<false>(false, true); !none.empty())
        failed("a read after the host waited was reported: %s", none[0].c_str());
    count_checks(3);
    if (const auto none = read_after_two<true, false>(); !none.empty())
        failed("a read of what the kernel in front had waited for was reported: %s", none[0].c_str());
    if (read_after_two<true, true>().empty())
        failed("a read before grid_wait of what the kernel in front wrote was not reported");
    if (read_after_two<false, false>().empty())
        failed("a read before grid_wait, after a kernel that let it start too early, was not reported");
}

KDT_CASE(planted_races_between_streams) {
    count_checks(5);
    for (const Order order : {Order::fork, Order::join}) {
        if (const auto none = read_on_another_stream(order, false); !none.empty())
            failed("a read after an event was reported: %s", none[0].c_str());
        const auto wrong = read_on_another_stream(order, true);
        if (wrong.empty() || wrong[0].find("another stream") == std::string::npos)
            failed("a read after an event that was recorded before the write was not reported");
    }
    if (read_on_another_stream(Order::nothing, false).empty())
        failed("a read on another stream without an event was not reported");
}

}  // namespace kdt::testing
