// Command lines of the tools: an option is followed by its value, and whatever is wrong ends in one sentence
// that names the option, what was given and what was expected.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace kdt {

class UsageError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

class Arguments {
  public:
    Arguments(int argc, char** argv) : words_(argv + (argc > 0 ? 1 : 0), argv + argc) {}

    // The next word that is no value; false at the end.
    bool next();
    const std::string& word() const { return words_[at_ - 1]; }
    bool is(const char* option) const { return word() == option; }
    bool is_option() const { return word().starts_with("-") && word().size() > 1; }

    // The value of the current option. All of them throw UsageError.
    std::string text();
    std::string choice(const std::vector<const char*>& known);
    int integer(int low, int high);
    std::vector<int> integers(int low, int high);  // separated by commas
    std::vector<std::string> choices(const std::vector<const char*>& known);
    [[noreturn]] void unknown() const;  // an option that the tool does not have

  private:
    const std::string& value();
    int number(const std::string& text, int low, int high) const;
    void check(const std::string& text, const std::vector<const char*>& known) const;

    std::vector<std::string> words_;
    size_t at_ = 0, option_ = 0;
};

// Runs a tool: `parse` reads the options and returns false where only the usage is asked for, `run` is the
// work. Exit codes: what `run` returns, 1 after an error, 2 after wrong usage.
template <class Parse, class Run>
int run_tool(const char* name, const char* usage, const Parse& parse, const Run& run) {
    try {
        if (!parse()) {
            std::fputs(usage, stdout);
            return 0;
        }
        return run();
    } catch (const UsageError& error) {
        std::fprintf(stderr, "%s: %s; --help shows the options\n", name, error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", name, error.what());
        return 1;
    }
}

}  // namespace kdt
