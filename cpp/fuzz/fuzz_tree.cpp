// Draft trees from arbitrary tables and paths, and walks through them.
//
// Properties: the shape of a tree (parents first, unique siblings, budget, depth, vocabulary), weights that
// never rise in pop order, every smaller budget's tree a prefix of a larger one's, the same nodes as a sorted
// list of all prefixes (Proposition 3 of arXiv 2604.12989), visibility equal to ancestor lists; and of a
// walk: that it is a path, that it follows the target's tokens, and that it ends where it must.
#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <tuple>

#include "core/limits.h"
#include "ddtree/accept.h"
#include "ddtree/build.h"
#include "fuzz/check.h"

using namespace kdt;

namespace {

// Consumes the fuzzer's bytes; zeros when there are none left.
class Bytes {
  public:
    Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
    uint8_t byte() {
        if (size_ == 0) return 0;
        --size_;
        return *data_++;
    }
    int below(int n) { return byte() % n; }
    // Mostly few different values, so that ties are common; then everything that a float can be.
    float logp() {
        const uint8_t kind = byte();
        if (kind < 160) return static_cast<float>(kind % 8) * -0.5f;
        if (kind < 200) return static_cast<float>(kind) * -1.000123f;
        switch (kind % 10) {
            case 0:
                return std::numeric_limits<float>::quiet_NaN();
            case 1:
                return std::numeric_limits<float>::infinity();
            case 2:
                return -std::numeric_limits<float>::infinity();
            case 3:
                return 0.25f;
            case 4:
                return -std::numeric_limits<float>::max();
            case 5:
                return -0.0f;
            case 6:
                return -std::numeric_limits<float>::denorm_min();
            default: {
                const uint32_t bits =
                    uint32_t{byte()} << 24 | uint32_t{byte()} << 16 | uint32_t{byte()} << 8 | byte();
                float value;
                std::memcpy(&value, &bits, sizeof value);
                return value;
            }
        }
    }
    int32_t token() {
        const uint8_t kind = byte();
        if (kind == 255) return -1;
        if (kind == 254) return std::numeric_limits<int32_t>::max();
        if (kind == 253) return std::numeric_limits<int32_t>::min();
        return kind % 12;
    }

  private:
    const uint8_t* data_;
    size_t size_;
};

struct Proposals {
    DraftTable table;
    DraftPaths paths;
    std::vector<int32_t> table_token, path_length, path_token;
    std::vector<float> table_logp, path_logp;

    explicit Proposals(Bytes& in) {
        const bool wide = in.below(4) == 0;
        table.depth = in.below(wide ? kMaxTableDepth + 1 : 5);
        table.width = in.below(wide ? kMaxTableWidth + 1 : 6);
        const bool sorted = in.below(4) != 0;  // an honest drafter's rows
        for (int d = 0; d < table.depth; ++d) {
            std::vector<float> row;
            for (int k = 0; k < table.width; ++k) {
                table_token.push_back(sorted && in.below(8) != 0 ? k : in.token());
                row.push_back(in.logp());
            }
            if (sorted && std::none_of(row.begin(), row.end(), [](float x) { return x != x; }))
                std::sort(row.begin(), row.end(), std::greater<>());
            table_logp.insert(table_logp.end(), row.begin(), row.end());
        }
        paths.count = in.below(5);
        paths.stride = 1 + in.below(kMaxDepth);
        for (int p = 0; p < paths.count; ++p) {
            path_length.push_back(in.below(paths.stride + 1));
            for (int d = 0; d < paths.stride; ++d) {
                const bool used = d < path_length.back();
                path_token.push_back(used ? in.token() : 0);
                path_logp.push_back(used ? in.logp() : 0.0f);
            }
        }
        table.token = table_token.data();
        table.logp = table_logp.data();
        paths.length = path_length.data();
        paths.token = path_token.data();
        paths.logp = path_logp.data();
    }
};

bool is_log_probability(float x) {
    return x <= 0.0f && x >= -std::numeric_limits<float>::max();
}

// A proposed prefix's place in pop order: heaviest first, the table (-1) before paths, then the smaller rank
// path or the shorter part of the path.
struct Place {
    double weight;
    int path;
    std::vector<int> rank;
    bool operator<(const Place& other) const {
        if (weight != other.weight) return weight > other.weight;
        return std::tie(path, rank) < std::tie(other.path, other.rank);
    }
};

// Every prefix that anyone proposes, with its best place: straight from the definition in ddtree/build.h.
class Enumeration {
  public:
    Enumeration(const Proposals& from, const BuildLimits& limits) : from_(from), limits_(limits) {
        std::vector<int32_t> prefix;
        Place place{0.0, -1, {}};
        extend(prefix, place);
        for (int p = 0; p < from.paths.count; ++p) {
            place = {0.0, p, {0}};
            prefix.clear();
            for (int d = 0; d < std::min(from.path_length[p], limits.max_depth); ++d) {
                const int at = p * from.paths.stride + d;
                if (!is_log_probability(from.path_logp[at]) || !is_token(from.path_token[at])) break;
                place.weight += from.path_logp[at];
                place.rank[0] = d;
                prefix.push_back(from.path_token[at]);
                offer(prefix, place);
            }
        }
    }

    // All prefixes in pop order.
    std::vector<std::pair<Place, std::vector<int32_t>>> sorted() const {
        std::vector<std::pair<Place, std::vector<int32_t>>> result;
        for (const auto& [prefix, place] : places_) result.emplace_back(place, prefix);
        std::sort(result.begin(), result.end(),
                  [](const auto& a, const auto& b) { return a.first < b.first; });
        return result;
    }

  private:
    bool is_token(int32_t token) const { return token >= 0 && token < limits_.vocab; }
    void offer(const std::vector<int32_t>& prefix, const Place& place) {
        const auto [at, fresh] = places_.emplace(prefix, place);
        if (!fresh && place < at->second) at->second = place;
    }
    void extend(std::vector<int32_t>& prefix, const Place& place) {
        const int depth = static_cast<int>(prefix.size());
        if (depth >= from_.table.depth || depth >= limits_.max_depth) return;
        for (int k = 0; k < from_.table.width; ++k) {
            const int at = depth * from_.table.width + k;
            const float logp = from_.table_logp[at];
            if (!is_log_probability(logp) || !is_token(from_.table_token[at])) return;
            if (k > 0 && logp > from_.table_logp[at - 1]) return;
            Place next = place;
            next.weight += logp;
            next.rank.push_back(k);
            prefix.push_back(from_.table_token[at]);
            offer(prefix, next);
            extend(prefix, next);
            prefix.pop_back();
        }
    }

    const Proposals& from_;
    const BuildLimits& limits_;
    std::map<std::vector<int32_t>, Place> places_;
};

std::vector<int32_t> prefix_of(const Tree& tree, int node) {
    std::vector<int32_t> rows, prefix;
    ancestors(tree.parent.data(), node, rows);
    for (size_t i = 1; i < rows.size(); ++i) prefix.push_back(tree.token[rows[i]]);
    return prefix;
}

void check_tree(const Tree& tree, int32_t root, const BuildLimits& limits) {
    const size_t rows = static_cast<size_t>(tree.count) + 1;
    KDT_FUZZ_CHECK(tree.count >= 0 && tree.count <= limits.budget);
    KDT_FUZZ_CHECK(tree.token.size() == rows && tree.parent.size() == rows && tree.depth.size() == rows);
    KDT_FUZZ_CHECK(tree.source.size() == rows && tree.weight.size() == rows);
    KDT_FUZZ_CHECK(tree.token[0] == root && tree.parent[0] == -1 && tree.depth[0] == 0);
    KDT_FUZZ_CHECK(tree.weight[0] == 0.0 && tree.source[0] == 0);
    std::vector<std::pair<int32_t, int32_t>> edges;
    for (int i = 1; i <= tree.count; ++i) {
        KDT_FUZZ_CHECK(tree.parent[i] >= 0 && tree.parent[i] < i);
        KDT_FUZZ_CHECK(tree.depth[i] == tree.depth[tree.parent[i]] + 1 && tree.depth[i] <= limits.max_depth);
        KDT_FUZZ_CHECK(tree.weight[i] <= tree.weight[i - 1]);  // false for NaN
        KDT_FUZZ_CHECK(tree.token[i] >= 0 && tree.token[i] < limits.vocab);
        KDT_FUZZ_CHECK(tree.source[i] >= 1 && tree.source[i] <= (kFromTable | kFromPath));
        edges.emplace_back(tree.parent[i], tree.token[i]);
    }
    std::sort(edges.begin(), edges.end());
    KDT_FUZZ_CHECK(std::adjacent_find(edges.begin(), edges.end()) == edges.end());

    const std::vector<uint32_t> bits = visibility(tree);
    const size_t words = (rows + 31) / 32;
    std::vector<int32_t> list, from_bits;
    for (int i = 0; i <= tree.count; ++i) {
        ancestors(tree.parent.data(), i, list);
        from_bits.clear();
        for (int j = 0; j <= tree.count; ++j)
            if (bits[i * words + j / 32] >> (j % 32) & 1) from_bits.push_back(j);
        KDT_FUZZ_CHECK(list == from_bits);  // parents come first: pop order is order by depth
    }
}

void check_prefix(const Tree& small, const Tree& large) {
    KDT_FUZZ_CHECK(small.count <= large.count);
    const auto begins = [](const auto& a, const auto& b) {
        return std::equal(a.begin(), a.end(), b.begin());
    };
    KDT_FUZZ_CHECK(begins(small.token, large.token) && begins(small.parent, large.parent));
    KDT_FUZZ_CHECK(begins(small.depth, large.depth) && begins(small.source, large.source));
    KDT_FUZZ_CHECK(begins(small.weight, large.weight));
}

// The tree is the list of all prefixes, heaviest first, cut at the budget.
void check_optimal(const Tree& tree, const Proposals& proposals, const BuildLimits& limits) {
    double candidates = 1;
    for (int d = 0; d < proposals.table.depth; ++d) candidates = candidates * proposals.table.width + 1;
    if (candidates > 2000) return;
    const auto all = Enumeration(proposals, limits).sorted();
    KDT_FUZZ_CHECK(static_cast<size_t>(tree.count) == std::min<size_t>(all.size(), limits.budget));
    for (int i = 1; i <= tree.count; ++i) {
        KDT_FUZZ_CHECK(tree.weight[i] == all[i - 1].first.weight);
        KDT_FUZZ_CHECK(prefix_of(tree, i) == all[i - 1].second);
    }
}

void check_walk(const Tree& tree, Bytes& in) {
    std::vector<int32_t> selected;
    for (int i = 0; i <= tree.count; ++i) {
        // Often the token of some child, so that walks go deep.
        const int child = i + 1 + in.below(4);
        selected.push_back(child <= tree.count && in.below(4) != 0 ? tree.token[child] : in.token());
    }
    const int rows = 1 + in.below(tree.count + 1);
    const int limit = in.below(8) == 0 ? in.below(4) : kMaxTreeRows;
    std::vector<int32_t> stops;
    for (int n = in.below(3); n > 0; --n) stops.push_back(in.token());
    const Accepted walk = accept(tree.token, tree.parent, selected, rows, limit, stops);

    KDT_FUZZ_CHECK(walk.path.size() == walk.emitted.size() && static_cast<int>(walk.path.size()) <= limit);
    const auto stop = [&](int32_t token) {
        return std::find(stops.begin(), stops.end(), token) != stops.end();
    };
    const auto child_of = [&](int32_t row) {
        for (int i = 1; i < rows; ++i)
            if (tree.parent[i] == row && tree.token[i] == selected[row]) return i;
        return -1;
    };
    int expected = 0;
    for (size_t i = 0; i < walk.path.size(); ++i) {
        KDT_FUZZ_CHECK(expected >= 0 && walk.path[i] == expected);
        KDT_FUZZ_CHECK(walk.emitted[i] == selected[expected] && walk.emitted[i] >= 0);
        KDT_FUZZ_CHECK(i + 1 == walk.path.size() || !stop(walk.emitted[i]));
        expected = child_of(expected);
    }
    const bool stopped = !walk.emitted.empty() && stop(walk.emitted.back());
    const bool full = static_cast<int>(walk.path.size()) == limit;
    KDT_FUZZ_CHECK(walk.failed == (!stopped && !full && expected >= 0 && selected[expected] < 0));
    KDT_FUZZ_CHECK(stopped || full || walk.failed || expected < 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Bytes in(data, size);
    BuildLimits limits;
    limits.budget = in.below(kMaxNodes + 1);
    limits.max_depth = in.below(4) == 0 ? in.below(kMaxDepth + 1) : kMaxDepth;
    if (in.below(2)) limits.vocab = 1 + in.below(12);
    BuildLimits smaller = limits;
    smaller.budget = in.below(limits.budget + 1);
    const int32_t root = in.token();
    const Proposals proposals(in);

    const Tree tree = build_tree(root, proposals.table, proposals.paths, limits);
    check_tree(tree, root, limits);
    check_prefix(build_tree(root, proposals.table, proposals.paths, smaller), tree);
    check_optimal(tree, proposals, limits);
    check_walk(tree, in);
    return 0;
}
