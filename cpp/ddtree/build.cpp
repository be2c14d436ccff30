#include "ddtree/build.h"

#include <cmath>
#include <queue>

namespace kdt {

namespace {

// One candidate of the frontier. A table candidate is (parent node, rank) at some depth; a path candidate is
// the next step of a path.
struct Candidate {
    double weight;
    int path;                   // -1: from the table
    int parent;                 // node
    int depth;                  // of the candidate
    std::vector<int16_t> rank;  // table: the whole rank path
};

// Heaviest first; the table before paths; smaller rank path, then lower path index.
struct Later {
    bool operator()(const Candidate& a, const Candidate& b) const {
        if (a.weight != b.weight) return a.weight < b.weight;
        if (a.path != b.path) return a.path > b.path;
        return a.rank > b.rank;  // std::vector compares lexicographically, a prefix before its extensions
    }
};

bool is_log_probability(float x) {
    return x <= 0.0f && x > -HUGE_VALF;
}  // false for NaN

class Builder {
  public:
    Builder(int32_t root, const DraftTable& table, const DraftPaths& paths, const BuildLimits& limits)
        : table_(table), paths_(paths), limits_(limits) {
        add_node(root, -1, 0, 0.0);
    }

    Tree run() {
        push_table(0, 1, {}, 0, 0.0);
        for (int p = 0; p < paths_.count; ++p) push_path(p, 0, 0, 0.0);
        while (!frontier_.empty() && tree_.count < limits_.budget) {
            Candidate next = frontier_.top();
            frontier_.pop();
            take(next);
        }
        mark_sources();
        return std::move(tree_);
    }

  private:
    int32_t token_of(const Candidate& c) const {
        return c.path < 0 ? table_.token[(c.depth - 1) * table_.width + c.rank.back()]
                          : paths_.token[c.path * paths_.stride + c.depth - 1];
    }

    int child_with_token(const Candidate& c) const { return child_with_token(c.parent, token_of(c)); }

    int child_with_token(int parent, int32_t token) const {
        for (int i = parent + 1; i <= tree_.count; ++i)
            if (tree_.parent[i] == parent && tree_.token[i] == token) return i;
        return -1;
    }

    bool is_token(int32_t token) const { return token >= 0 && token < limits_.vocab; }

    // Whether an entry may follow the one before it in its row (which is usable itself).
    bool usable(int depth, int rank) const {
        const int at = (depth - 1) * table_.width + rank;
        return is_log_probability(table_.logp[at]) && is_token(table_.token[at]) &&
               (rank == 0 || table_.logp[at] <= table_.logp[at - 1]);
    }

    // Whether the token stands earlier in its row: the same prefixes, with at least the same weights. Taking
    // such entries too would make as many candidates as there are rank paths where a row is one token.
    bool repeated(int depth, int rank) const {
        const int32_t* row = table_.token + (depth - 1) * table_.width;
        for (int i = 0; i < rank; ++i)
            if (row[i] == row[rank]) return true;
        return false;
    }

    bool in_row(int depth, int32_t token) const {
        if (depth > table_.depth) return false;
        for (int rank = 0; rank < table_.width && usable(depth, rank); ++rank)
            if (table_.token[(depth - 1) * table_.width + rank] == token) return true;
        return false;
    }

    // Everyone who proposes a node, whether or not their candidate came up before the budget ran out: so the
    // sources of a node, like the rest of it, are the same in every larger tree.
    void mark_sources() {
        for (int i = 1; i <= tree_.count; ++i) {
            const int parent = tree_.parent[i];
            if ((parent == 0 || (tree_.source[parent] & kFromTable)) &&
                in_row(tree_.depth[i], tree_.token[i]))
                tree_.source[i] = kFromTable;
        }
        for (int p = 0; p < paths_.count; ++p) {
            int node = 0;
            for (int d = 0; d < paths_.length[p]; ++d) {
                const int at = p * paths_.stride + d;
                if (!is_log_probability(paths_.logp[at]) || !is_token(paths_.token[at])) break;
                node = child_with_token(node, paths_.token[at]);
                if (node < 0) break;
                tree_.source[node] |= kFromPath;
            }
        }
    }

    void take(const Candidate& c) {
        int node = child_with_token(c);  // proposed before, with at least this weight: the same node
        if (node < 0) node = add_node(token_of(c), c.parent, c.depth, c.weight);
        if (c.path < 0) {
            const double parent_weight = table_parent_weight(c);
            std::vector<int16_t> sibling(c.rank.begin(), c.rank.end() - 1);
            push_table(c.parent, c.depth, sibling, c.rank.back() + 1, parent_weight);
            push_table(node, c.depth + 1, c.rank, 0, c.weight);
        } else {
            push_path(c.path, node, c.depth, c.weight);
        }
    }

    // The float64 sum of the rank path without its last step: recomputed from the root so that it never
    // depends on which source gave the parent node its weight.
    double table_parent_weight(const Candidate& c) const {
        double weight = 0.0;
        for (int d = 0; d + 1 < c.depth; ++d) weight += table_.logp[d * table_.width + c.rank[d]];
        return weight;
    }

    void push_table(int parent, int depth, const std::vector<int16_t>& prefix, int rank,
                    double parent_weight) {
        if (depth > table_.depth || depth > limits_.max_depth) return;
        while (rank < table_.width && usable(depth, rank) && repeated(depth, rank)) ++rank;
        if (rank >= table_.width || !usable(depth, rank)) return;
        const float* row = table_.logp + (depth - 1) * table_.width;
        Candidate c{parent_weight + row[rank], -1, parent, depth, prefix};
        c.rank.push_back(static_cast<int16_t>(rank));
        frontier_.push(std::move(c));
    }

    void push_path(int path, int parent, int parent_depth, double parent_weight) {
        if (parent_depth >= paths_.length[path] || parent_depth >= limits_.max_depth) return;
        const int at = path * paths_.stride + parent_depth;
        if (!is_log_probability(paths_.logp[at]) || !is_token(paths_.token[at])) return;
        frontier_.push(Candidate{parent_weight + paths_.logp[at], path, parent, parent_depth + 1, {}});
    }

    int add_node(int32_t token, int parent, int depth, double weight) {
        tree_.token.push_back(token);
        tree_.parent.push_back(parent);
        tree_.depth.push_back(depth);
        tree_.source.push_back(0);
        tree_.weight.push_back(weight);
        tree_.count = static_cast<int>(tree_.token.size()) - 1;
        return tree_.count;
    }

    const DraftTable& table_;
    const DraftPaths& paths_;
    const BuildLimits limits_;
    Tree tree_;
    std::priority_queue<Candidate, std::vector<Candidate>, Later> frontier_;
};

}  // namespace

Tree build_tree(int32_t root_token, const DraftTable& table, const DraftPaths& paths,
                const BuildLimits& limits) {
    return Builder(root_token, table, paths, limits).run();
}

void ancestors(const int32_t* parent, int node, std::vector<int32_t>& out) {
    out.clear();
    for (int i = node; i >= 0; i = parent[i]) out.push_back(i);
    std::vector<int32_t>(out.rbegin(), out.rend()).swap(out);
}

std::vector<uint32_t> visibility(const Tree& tree) {
    const int rows = tree.count + 1;
    const int words = (rows + 31) / 32;
    std::vector<uint32_t> bits(static_cast<size_t>(rows) * words, 0);
    for (int i = 0; i < rows; ++i) {
        if (tree.parent[i] >= 0)
            for (int w = 0; w < words; ++w) bits[i * words + w] = bits[tree.parent[i] * words + w];
        bits[i * words + i / 32] |= 1u << (i % 32);
    }
    return bits;
}

}  // namespace kdt
