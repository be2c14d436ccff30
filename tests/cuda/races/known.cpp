// Races that are there and stay for now, each with the reason why it does no harm. A function is named here
// only after the machine code has been looked at.
#include "races.h"

namespace kdt_emulator::races {

const std::vector<KnownRace> known_races = {
    {"norm_rotate_head",
     "In place (`to` is `x`), a lane writes what other lanes of its warp have read for the sum of squares, "
     "and between "
     "them are only the shuffles of warp_sum, which order no memory. What is written depends on every one of "
     "those "
     "reads by way of the shuffles, so none can come after it. A __syncwarp after warp_sum would say so."},
};

}  // namespace kdt_emulator::races
