// Call stacks of emulated threads, for the race detector's reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kdt_emulator::races {

class CallStack {
  public:
    void enter(const void* call) { frames_.push_back(at(call)); }
    void leave() {
        if (!frames_.empty()) frames_.pop_back();
    }
    // The number under which this stack with `place` on top of it is kept.
    uint32_t at(const void* place) const;

  private:
    std::vector<uint32_t> frames_;
};

CallStack* running_stack();  // of the thread that runs; null outside kernels

// Its functions and lines, innermost first, without the emulator's own.
std::vector<std::string> names_of(uint32_t stack);

}  // namespace kdt_emulator::races
