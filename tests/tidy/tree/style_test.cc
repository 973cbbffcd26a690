// Sizes, banned calls, banned words: the hard limits of the house style.
#include <gtest/gtest.h>

#include <regex>

#include "tests/tidy/tree/source_tree.h"

namespace upipe::tidy {
namespace {

constexpr size_t kMostColumns = 100, kMostLines = 800;
constexpr int kFunctionLines = 70, kKernelLines = 150;

// UTF-8: what people count as characters.
size_t Columns(const std::string& line) {
  return std::count_if(line.begin(), line.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

bool IsTidyItself(const SourceFile& file) { return file.IsBelow("tests/tidy/"); }

TEST(Style, LineLength) {
  Violations violations("lines over 100 columns");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp()) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const size_t columns = Columns(file.lines[i]);
      if (columns > kMostColumns) violations.Add(file, i + 1, std::to_string(columns) + " columns");
    }
  }
}

TEST(Style, FileLength) {
  Violations violations("files over 800 lines");
  for (const SourceFile& file : Files()) {
    const bool written = file.IsCpp() || file.path.ends_with(".proto") ||
                         file.path.ends_with(".py") || file.path.ends_with(".sh") ||
                         file.path == "dev";
    if (written && file.lines.size() > kMostLines) {
      violations.Add(file, 1, std::to_string(file.lines.size()) + " lines");
    }
  }
}

TEST(Style, FunctionLength) {
  Violations violations("functions over 70 lines (kernel bodies over 150)");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp()) continue;
    const bool kernel = file.IsBelow("kernels/cpu/") || file.IsBelow("kernels/cuda/") ||
                        file.IsBelow("kernels/reference/");
    for (const FunctionSpan& function : Functions(file.code)) {
      if (function.Length() > (kernel ? kKernelLines : kFunctionLines)) {
        violations.Add(file, function.first_line, std::to_string(function.Length()) + " lines");
      }
    }
  }
}

TEST(Style, HeadersSayWhatTheyOwn) {
  Violations violations(
      "a header begins with a comment that says what it owns, and has #pragma once");
  for (const SourceFile& file : Files()) {
    if (!file.path.ends_with(".h")) continue;
    if (file.lines.empty() || !file.lines[0].starts_with("// "))
      violations.Add(file, 1, "no file header");
    const bool once =
        std::any_of(file.lines.begin(), file.lines.end(),
                    [](const std::string& line) { return line.starts_with("#pragma once"); });
    // Highway compiles "-inl.h" files once per instruction set.
    if (!once && !file.path.ends_with("-inl.h")) violations.Add(file, 1, "no #pragma once");
  }
}

struct BannedCall {
  std::regex call;
  std::regex allowed;  // paths
  std::string instead;
};

TEST(Style, BannedCalls) {
  const std::regex nowhere("^$");
  const std::regex mains(R"((^|/)(\w+_)?main\.cc$)");
  const std::regex tests_and_mains(R"((^|/)(\w+_)?main\.cc$|^(tests|benchmarks)/)");
  const std::vector<BannedCall> banned = {
      {std::regex(R"((^|[^\w.>:])(std::)?system\s*\()"), nowhere,
       "system: start processes with posix_spawn or fork+exec"},
      {std::regex(R"(\bpopen\s*\()"), std::regex("^tests/"),
       "popen: start processes without a shell"},
      {std::regex(R"(\b(secure_)?getenv\s*\()"), tests_and_mains,
       "getenv: the environment is read only in main"},
      {std::regex(R"(\bstd::(cout|cerr|clog)\b)"), tests_and_mains,
       "std::cout: libraries write to a stream they are given"},
      {std::regex(R"((^|[^\w])(std::)?(printf|puts)\s*\()"), tests_and_mains,
       "printf: libraries do not print"},
      {std::regex(R"((^|[^\w])(std::)?(s|vs)printf\s*\()"), nowhere, "sprintf: absl::StrFormat"},
      {std::regex(R"((^|[^\w])(std::)?(strcpy|strcat|gets)\s*\()"), nowhere, "unbounded copy"},
      {std::regex(R"((^|[^\w])assert\s*\()"), nowhere, "assert: UPIPE_CHECK stays on in release"},
      {std::regex(R"((^|[^\w])(std::)?s?rand\s*\()"), nowhere, "rand: a seeded generator"},
      {std::regex(R"(\brandom_device\b)"), std::regex("^common/ids.cc$|^client/"),
       "random_device: a seed that is written down"},
      {std::regex(R"(\.detach\s*\(\s*\))"), nowhere, "detach: every thread is joined"},
      {std::regex(R"(\busing namespace std\b)"), nowhere, "using namespace std"},
  };
  Violations violations("banned calls");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp()) continue;
    for (size_t i = 0; i < file.code.size(); ++i) {
      if (file.code[i].find_first_not_of(' ') == std::string::npos) continue;
      for (const BannedCall& entry : banned) {
        if (std::regex_search(file.code[i], entry.call) &&
            !std::regex_search(file.path, entry.allowed)) {
          violations.Add(file, i + 1, entry.instead);
        }
      }
    }
  }
}

// A test looks again at a condition with a deadline; it never sleeps and hopes.
TEST(Style, TestsPauseBrieflyBetweenLooks) {
  const std::regex sleeps(
      R"(\b(sleep_for|sleep_until|SleepFor|usleep|nanosleep)\s*\(|(^|[^\w.>])sleep\s*\()");
  const std::regex brief(R"(([mM]illiseconds\(|kPoll)(1?[0-9]|20)?\b)");
  Violations violations("a sleep that is no pause of at most 20 ms between two looks");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp() || !file.IsBelow("tests/")) continue;
    for (size_t i = 0; i < file.code.size(); ++i) {
      if (std::regex_search(file.code[i], sleeps) && !std::regex_search(file.code[i], brief)) {
        violations.Add(file, i + 1, file.lines[i]);
      }
    }
  }
}

TEST(Style, Names) {
  const std::regex vague(R"(^\s*(class|struct)\s+\w*(Manager|Util|Utils|Helper|Impl)\b(?!.*;))");
  Violations violations("a name that says nothing (Manager, Util, Helper, Impl)");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp() || IsTidyItself(file)) continue;
    for (size_t i = 0; i < file.code.size(); ++i) {
      if (std::regex_search(file.code[i], vague)) violations.Add(file, i + 1, file.lines[i]);
    }
  }
}

TEST(Style, Words) {
  const std::regex unfinished(R"(\b(TODO|FIXME|XXX|HACK|WIP)\b)");
  const std::regex machine_paths(R"((^|[^\w./~}$*-])/(work|tmp|home|root)/\w)");
  Violations violations("words that do not belong here");
  for (const SourceFile& file : Files()) {
    if (IsTidyItself(file)) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      if (std::regex_search(file.lines[i], unfinished))
        violations.Add(file, i + 1, "unfinished: " + file.lines[i]);
      if (std::regex_search(file.lines[i], machine_paths))
        violations.Add(file, i + 1, "one machine's path: " + file.lines[i]);
    }
  }
}

}  // namespace
}  // namespace upipe::tidy
