// Reads the named numbers of a config, each once: complains about missing, fractional, out-of-range and
// left-over ones.
#pragma once

#include <cmath>
#include <map>
#include <string>

#include "core/error.h"

namespace kdt {

class FieldReader {
  public:
    // Largest value any integer field may take: products of two of them stay far inside int64, products of a
    // field and a row count inside int.
    static constexpr double kMaxField = 1 << 24;

    // `where` stands before a field's name in messages: "config".
    FieldReader(const std::map<std::string, double>& fields, const char* where)
        : left_(fields), where_(where) {}

    double real(const char* key) {
        const auto it = left_.find(key);
        if (it == left_.end()) fail(ErrorCode::bad_model, "%s.%s is missing", where_, key);
        const double value = it->second;
        left_.erase(it);
        if (!std::isfinite(value))
            fail(ErrorCode::bad_model, "%s.%s is %g; expected a finite number", where_, key, value);
        return value;
    }

    int integer(const char* key, int least, double most = kMaxField) {
        const double value = real(key);
        if (value != std::floor(value) || value < least || value > most)
            fail(ErrorCode::bad_model, "%s.%s is %g; expected an integer from %d to %.0f", where_, key, value,
                 least, most);
        return static_cast<int>(value);
    }

    bool flag(const char* key) {
        const double value = real(key);
        if (value != 0.0 && value != 1.0)
            fail(ErrorCode::bad_model, "%s.%s is %g; expected 0 or 1", where_, key, value);
        return value == 1.0;
    }

    void finish() const {
        if (!left_.empty())
            fail(ErrorCode::bad_model, "%s.%s is not a field of this version", where_,
                 left_.begin()->first.c_str());
    }

  private:
    std::map<std::string, double> left_;
    const char* where_;
};

}  // namespace kdt
