// How a product is cut into pieces: templates of the CPU backend that several of its files use.
#pragma once

#include <algorithm>

#include "backend/cpu/cpu_backend.h"

namespace kdt::cpu {

// Calls f(begin, end, local) on every thread with its range of w's outputs: whole blocks, each exactly once.
template <class F>
void CpuBackend::split_outputs(const PackedMatrix& w, int rows, const F& f) {
    const int64_t blocks = (w.out + kBlockOutputs - 1) / kBlockOutputs;
    const int64_t block_work = static_cast<int64_t>(rows) * w.in * kBlockOutputs;
    constexpr int64_t kWorthAThread = 1 << 16;  // multiply-adds
    pool_.split(blocks, kWorthAThread / std::max<int64_t>(block_work, 1) + 1,
                [&](int64_t begin, int64_t end, int thread) {
                    f(static_cast<int>(begin) * kBlockOutputs,
                      std::min(static_cast<int>(end) * kBlockOutputs, w.out),
                      local_[static_cast<size_t>(thread)]);
                });
}

// Calls f(first output, outputs, sums) for consecutive pieces of the outputs [begin, end); sums[r *
// kTileColumns
// + j] = x[r] . w[first output + j], in `out`, which holds [rows, kTileColumns]. A border inside a block
// costs the block's other outputs and nothing else.
template <class F>
void CpuBackend::dot_pieces(const Dot& dot, int begin, int end, float* out, const F& f) {
    constexpr int kPieceBlocks = kTileColumns / kBlockOutputs;
    const int last_block = (end + kBlockOutputs - 1) / kBlockOutputs;
    for (int block = begin / kBlockOutputs; block < last_block; block += kPieceBlocks) {
        DotJob job;
        job.x = dot.x;
        job.rows = dot.rows;
        job.w = dot.w;
        job.block_begin = block;
        job.block_end = std::min(block + kPieceBlocks, last_block);
        job.out = out;
        job.stride = kTileColumns;
        k_.dots(job);
        const int from = std::max(begin, block * kBlockOutputs);
        const int to = std::min(end, job.block_end * kBlockOutputs);
        f(from, to - from, out + (from - block * kBlockOutputs));
    }
}

}  // namespace kdt::cpu
