// Races that are there and stay for now, each with the reason why it does no harm. A function is named here
// only after the machine code has been looked at.
#include "races.h"

namespace kdt_emulator::races {

const std::vector<KnownRace> known_races = {};

}  // namespace kdt_emulator::races
