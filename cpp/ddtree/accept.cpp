#include "ddtree/accept.h"

namespace kdt {

Accepted accept(std::span<const int32_t> token, std::span<const int32_t> parent,
                std::span<const int32_t> selected, int rows) {
    Accepted result;
    int at = 0;
    for (;;) {
        result.path.push_back(at);
        const int32_t wanted = selected[at];
        result.emitted.push_back(wanted);
        int child = -1;
        for (int i = at + 1; i < rows && child < 0; ++i)
            if (parent[i] == at && token[i] == wanted) child = i;
        if (child < 0) return result;
        at = child;
    }
}

}  // namespace kdt
