// top_k and select of the CPU backend: what a row of logits says.
#include <algorithm>
#include <bit>
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "core/error.h"

namespace kdt::cpu {

namespace {

// The k greatest of x[0 .. n), greatest first, ties to the lower index; no NaN among them. `index` holds
// `capacity` entries, at least k + 16; the first k are the result.
void top_entries(const Kernels& kernels, const float* x, int n, int k, int32_t* index, int capacity) {
    const auto before = [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
    float threshold = -HUGE_VALF;  // what the k-th so far has: nothing smaller can come in
    int count = 0;
    for (int next = 0; next < n;) {
        count += kernels.find_at_least(x, next, n, threshold, capacity - count, index + count, &next);
        if (count > k) {
            std::nth_element(index, index + (k - 1), index + count, before);
            count = k;
            threshold = x[index[k - 1]];
        }
    }
    std::sort(index, index + count, before);
}

// All of 0 .. n - 1 in the same order, for lists so long that comparing is slow: a radix sort by descending
// value, which keeps ascending indices where values are equal. `spare` holds n entries.
void sort_all(const float* x, int n, int32_t* index, int32_t* spare) {
    constexpr int kBits = 11, kPasses = 3, kBuckets = 1 << kBits;
    const auto key = [x](int32_t i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i] + 0.0f);  // one zero
        return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;              // ascending keys, descending values
    };
    for (int i = 0; i < n; ++i) index[i] = i;
    for (int pass = 0; pass < kPasses; ++pass) {
        const auto bucket = [&](int32_t i) { return key(i) >> (pass * kBits) & (kBuckets - 1); };
        int32_t start[kBuckets + 1] = {};
        for (int i = 0; i < n; ++i) ++start[bucket(index[i]) + 1];
        for (int b = 0; b < kBuckets; ++b) start[b + 1] += start[b];
        for (int i = 0; i < n; ++i) spare[start[bucket(index[i])]++] = index[i];
        std::swap(index, spare);
    }
    // After an odd number of passes the result is where the caller's spare was.
    std::copy_n(index, n, spare);
}

void check(const SampleParams& s) {
    if (!(s.temperature >= 0.0f) || std::isinf(s.temperature))
        fail(ErrorCode::invalid_argument, "temperature is %g; 0 or a positive number was expected",
             static_cast<double>(s.temperature));
    if (s.top_k < 0) fail(ErrorCode::invalid_argument, "top_k is %d; 0 (off) or more was expected", s.top_k);
    if (!(s.top_p > 0.0f && s.top_p <= 1.0f))
        fail(ErrorCode::invalid_argument, "top_p is %g; more than 0 and at most 1 was expected",
             static_cast<double>(s.top_p));
    if (!(s.min_p >= 0.0f && s.min_p <= 1.0f))
        fail(ErrorCode::invalid_argument, "min_p is %g; 0 to 1 was expected", static_cast<double>(s.min_p));
}

// Entries of a descending list of probabilities before which less than `limit` has been summed; the one that
// crosses is among them.
int until(const float* p, int n, float limit) {
    float before = 0.0f;
    int kept = 0;
    while (kept < n && before < limit) before = before + p[kept++];
    return kept;
}

}  // namespace

void CpuBackend::top_k(const TopKArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    if (args.k < 1 || args.k > args.vocab)
        fail(ErrorCode::invalid_argument, "the %d best of %d tokens were asked for", args.k, args.vocab);
    if (static_cast<size_t>(args.vocab) > local_[0].values.size())
        fail(ErrorCode::invalid_argument, "a vocabulary of %d needs more workspace than was reserved",
             args.vocab);
    pool_.split(rows, std::max(1, (1 << 15) / args.vocab), [&](int64_t begin, int64_t end, int thread) {
        Local& local = local_[static_cast<size_t>(thread)];
        int32_t* const index = local.index.data();
        for (int64_t i = begin; i < end; ++i) {
            const float* x = args.logits + i * args.vocab;
            int32_t* token = args.token + i * args.k;
            float* logp = args.logp + i * args.k;
            const Scan scan = k_.scan(x, args.vocab);
            if (scan.has_nan ||
                !std::isfinite(scan.max)) {  // no distribution: says so, and names real tokens
                for (int j = 0; j < args.k; ++j) {
                    token[j] = j;
                    logp[j] = NAN;
                }
                continue;
            }
            const float sum = k_.exp_sum(x, scan.max, args.vocab, nullptr);
            float log_sum;
            k_.log_each(&sum, 1, &log_sum);
            top_entries(k_, x, args.vocab, args.k, index, std::min(args.vocab, 4 * args.k) + kSpareIndices);
            for (int j = 0; j < args.k; ++j) {
                token[j] = index[j];
                logp[j] = (x[index[j]] - scan.max) - log_sum;
            }
        }
    });
}

int32_t CpuBackend::select_row(const SelectArgs& args, int row, Local& local) const {
    const SampleParams& s = *args.sample;
    const float* x = args.logits + static_cast<ptrdiff_t>(row) * args.vocab;
    const int n = args.vocab;
    const Scan scan = k_.scan(x, n);
    if (scan.has_nan || scan.argmax < 0) return -1;
    if (s.temperature == 0.0f) return scan.argmax;

    GumbelJob job;
    job.key[0] = static_cast<uint32_t>(s.seed);
    job.key[1] = static_cast<uint32_t>(s.seed >> 32);
    job.position = static_cast<uint32_t>(args.position[row]) + 1;
    job.choice = s.choice;
    job.min_p = s.min_p;

    const int top_k = s.top_k > 0 && s.top_k < n ? s.top_k : 0;
    float* const z = local.values.data();
    if (top_k == 0 && s.top_p >= 1.0f) {
        k_.shift_divide(x, scan.max, s.temperature, n, z);
        job.z = z;
        job.id = nullptr;
        job.n = n;
        return k_.gumbel_argmax(job);
    }

    // What is kept is a beginning of the list in descending order: it is made only as long as it must be.
    int32_t* const id = local.index.data();
    float total = 0.0f;
    if (top_k == 0) {
        k_.shift_divide(x, scan.max, s.temperature, n, z);
        total = k_.exp_sum(z, 0.0f, n, nullptr);
    }
    int kept = 0;
    for (int length = top_k > 0 ? top_k : std::min(n, 128);;
         length = length < 1024 && length * 8 < n ? length * 8 : n) {
        if (length == n)
            sort_all(x, n, id, id + n);
        else
            top_entries(k_, x, n, length, id, std::min(n, 4 * length) + kSpareIndices);
        for (int j = 0; j < length; ++j) z[j] = x[id[j]];
        k_.shift_divide(z, scan.max, s.temperature, length, z);
        kept = length;
        if (s.top_p >= 1.0f) break;
        float* const p = local.probability.data();
        k_.exp_sum(z, 0.0f, length, p);
        if (top_k > 0) {
            // The sum over the kept tokens in the order that it has over a whole row: lanes by token id.
            float lanes[kLanes] = {};
            int32_t* const order = id + length;
            for (int j = 0; j < length; ++j) order[j] = j;
            std::sort(order, order + length, [id](int32_t a, int32_t b) { return id[a] < id[b]; });
            for (int j = 0; j < length; ++j) lanes[id[order[j]] % kLanes] += p[order[j]];
            total = k_.lane_sum(lanes);
        }
        kept = until(p, length, s.top_p * total);
        if (kept < length || length == n || top_k > 0) break;
    }
    job.z = z;
    job.id = id;
    job.n = kept;
    return k_.gumbel_argmax(job);
}

void CpuBackend::select(const SelectArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    check(*args.sample);
    if (args.vocab < 1) fail(ErrorCode::invalid_argument, "a vocabulary of %d tokens", args.vocab);
    if (static_cast<size_t>(args.vocab) > local_[0].values.size())
        fail(ErrorCode::invalid_argument, "a vocabulary of %d needs more workspace than was reserved",
             args.vocab);
    pool_.split(rows, std::max(1, (1 << 15) / args.vocab), [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i)
            args.token[i] = select_row(args, static_cast<int>(i), local_[static_cast<size_t>(thread)]);
    });
}

}  // namespace kdt::cpu
