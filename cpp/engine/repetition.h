// How much a text repeats itself: a hint at drafts that will be right, for the price of one look-up a token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>

namespace kdt {

class Repetition {
  public:
    // `tokens`: the whole text so far. What was seen before must be its beginning.
    void see(std::span<const int32_t> tokens) {
        for (; seen_ < tokens.size(); ++seen_) {
            if (seen_ < kContext) continue;
            uint64_t key = 0;
            for (size_t i = seen_ - kContext; i < seen_; ++i)
                key = (key ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15u;
            const auto [place, fresh] = last_.try_emplace(key, tokens[seen_]);
            const bool again = !fresh && place->second == tokens[seen_];
            place->second = tokens[seen_];
            share_ += ((again ? 1.0 : 0.0) - share_) / kMemory;
        }
    }
    // Of the last tokens, decaying: those that followed the three before them the last time, too.
    double share() const { return share_; }
    size_t seen() const { return seen_; }

  private:
    static constexpr size_t kContext = 3;
    static constexpr double kMemory = 8.0;  // tokens

    std::unordered_map<uint64_t, int32_t> last_;  // hash of three tokens -> what followed
    size_t seen_ = 0;
    double share_ = 0.0;
};

}  // namespace kdt
