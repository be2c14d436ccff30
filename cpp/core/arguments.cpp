#include "core/arguments.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace kdt {

namespace {

template <class... Values>
[[noreturn]] void wrong(const char* text, Values... values) {
    throw UsageError(format(text, values...));
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        parts.push_back(text.substr(at, comma - at));
        at = comma + 1;
    }
    return parts;
}

}  // namespace

bool Arguments::next() {
    if (at_ == words_.size()) return false;
    option_ = at_++;
    return true;
}

const std::string& Arguments::value() {
    if (at_ == words_.size()) wrong("%s needs a value", words_[option_].c_str());
    return words_[at_++];
}

std::string Arguments::text() {
    return value();
}

void Arguments::check(const std::string& text, const std::vector<const char*>& known) const {
    if (std::find(known.begin(), known.end(), text) != known.end()) return;
    std::string all;
    for (const char* name : known) all += (all.empty() ? "" : ", ") + std::string(name);
    wrong("%s is '%s'; expected one of %s", words_[option_].c_str(), text.c_str(), all.c_str());
}

std::string Arguments::choice(const std::vector<const char*>& known) {
    const std::string& text = value();
    check(text, known);
    return text;
}

std::vector<std::string> Arguments::choices(const std::vector<const char*>& known) {
    std::vector<std::string> parts = split(value());
    for (const std::string& part : parts) check(part, known);
    return parts;
}

int Arguments::number(const std::string& text, int low, int high) const {
    int number = 0;
    const char *first = text.data(), *end = first + text.size();
    const auto result = std::from_chars(first, end, number);
    if (result.ec != std::errc() || result.ptr != end || number < low || number > high)
        wrong("%s is '%s'; expected an integer from %d to %d", words_[option_].c_str(), text.c_str(), low,
              high);
    return number;
}

int Arguments::integer(int low, int high) {
    return number(value(), low, high);
}

std::vector<int> Arguments::integers(int low, int high) {
    std::vector<int> numbers;
    for (const std::string& part : split(value())) numbers.push_back(number(part, low, high));
    return numbers;
}

void Arguments::unknown() const {
    wrong("%s is not an option", words_[option_].c_str());
}

}  // namespace kdt
