// How the attention of a draft block is cut, as plain functions of the layer's window and of absolute
// positions: tests/cuda checks it on any machine.
#pragma once

#include <algorithm>

#include "backend/cuda/layout.h"

namespace kdt::cuda {

inline constexpr int kMaxHeadDim = 1024;

// Where the accumulators of a block's attention restart: absolute positions, from the layer's window alone.
// A window keeps the number of splits small at any position, so they may stay short; without one they grow.
struct BlockSplits {
    static constexpr int kSplit = 256;       // keys of a split
    static constexpr int kLongSplit = 1024;  // behind kLongFrom, where no short window bounds them
    static constexpr int kLongFrom = 8192;   // a position
    static constexpr int kLongestShortWindow = 8192;

    bool uniform;

    // `window` 0: none.
    static BlockSplits of_window(int window) { return {window > 0 && window <= kLongestShortWindow}; }

    // Split s covers positions [start(s), start(s + 1)).
    KDT_HOST_DEVICE int start(int s) const {
        if (uniform || s <= kLongFrom / kSplit) return s * kSplit;
        return kLongFrom + (s - kLongFrom / kSplit) * kLongSplit;
    }
    // The split that holds position p.
    KDT_HOST_DEVICE int of(int p) const {
        if (uniform || p < kLongFrom) return p / kSplit;
        return kLongFrom / kSplit + (p - kLongFrom) / kLongSplit;
    }
};

// Splits that one row can meet, of `positions` at most.
inline int block_parts(int window, int positions) {
    const BlockSplits splits = BlockSplits::of_window(window);
    if (!splits.uniform) return splits.of(positions - 1) + 1;
    const int keys = std::min(positions, 2 * window - 1);  // window - 1 on each side
    return (keys + BlockSplits::kSplit - 2) / BlockSplits::kSplit + 1;
}

// Heads that the tensor-core attention takes.
inline bool block_attend_has_tensor_cores(int head_dim) {
    return head_dim % 8 == 0 && head_dim <= 128;
}

}  // namespace kdt::cuda
