// Best-first construction of the draft tree (Ringel and Romano, arXiv 2604.12989, section 3; Proposition 3).
//
// Candidates are prefixes: those of the table (for depths 1..L one of K ranked tokens each) and those of
// weighted paths (n-gram matches and the like). The weight of a prefix is the float64 sum of its float32
// log-probabilities from the root down; a prefix that several sources propose has the largest of its weights
// and all of its sources. The tree is the `budget` heaviest prefixes, popped heaviest first. Ties: the table
// before paths; within the table the lexicographically smaller rank path (a prefix before its extensions);
// among paths the lower path index. Nodes are numbered in pop order, so the tree of n nodes is the first n
// nodes of any larger one.
//
// A table row or a path ends at its first entry that is no log-probability in order: NaN, infinite, positive,
// or (table) greater than the entry before it; both at a token outside the vocabulary. Such values only cost
// acceptance.
#pragma once

#include <cstdint>
#include <span>

#include "ddtree/tree.h"

namespace kdt {

struct DraftTable {
    int depth = 0;                   // L
    int width = 0;                   // K
    const int32_t* token = nullptr;  // [L, K]
    const float* logp = nullptr;     // [L, K], rows in descending order
};

struct DraftPaths {
    int count = 0;
    int stride = 0;                   // entries per path in the arrays
    const int32_t* length = nullptr;  // [count]
    const int32_t* token = nullptr;   // [count, stride]
    const float* logp = nullptr;      // [count, stride]
};

struct BuildLimits {
    int budget = 0;         // nodes at most, the root not counted
    int max_depth = 0;      // depth of a node at most
    int vocab = INT32_MAX;  // tokens are 0 .. vocab - 1
};

Tree build_tree(int32_t root_token, const DraftTable& table, const DraftPaths& paths,
                const BuildLimits& limits);

// Scratch rows that node i sees: the nodes from the root down to i itself.
void ancestors(const int32_t* parent, int node, std::vector<int32_t>& out);

// The same as a bitmask, [count + 1, ceil((count + 1) / 32)] words, bit j of row i set where node i sees node
// j. The documented form of visibility; attention uses the ancestor lists.
std::vector<uint32_t> visibility(const Tree& tree);

}  // namespace kdt
