#include "ddtree/accept.h"

#include <algorithm>

namespace kdt {

Accepted accept(std::span<const int32_t> token, std::span<const int32_t> parent,
                std::span<const int32_t> selected, int rows, int limit, std::span<const int32_t> stops) {
    Accepted result;
    int at = 0;
    while (static_cast<int>(result.emitted.size()) < limit) {
        const int32_t wanted = selected[at];
        if (wanted < 0) {
            result.failed = true;
            break;
        }
        result.path.push_back(at);
        result.emitted.push_back(wanted);
        if (std::find(stops.begin(), stops.end(), wanted) != stops.end()) break;
        int child = -1;
        for (int i = at + 1; i < rows && child < 0; ++i)
            if (parent[i] == at && token[i] == wanted) child = i;
        if (child < 0) break;
        at = child;
    }
    return result;
}

}  // namespace kdt
