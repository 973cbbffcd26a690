// docs/peer-cases.md and the tests it names: every number has its row, every name is a test, and
// every test that carries a number stands in the list.
#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>

#include "tests/tidy/tree/source_tree.h"

namespace upipe::tidy {
namespace {

constexpr char kDocument[] = "docs/peer-cases.md";
constexpr int kNumCases = 44;

// "Suite.Name" of every test.
std::set<std::string> TestNames() {
  static const std::regex head(R"(^TEST(?:_P|_F)?\((\w+),\s*(\w+)\))");
  std::set<std::string> names;
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp() || !file.IsBelow("tests/")) continue;
    for (size_t i = 0; i < file.code.size(); ++i) {
      std::string text = file.code[i];
      if (i + 1 < file.code.size()) text += file.code[i + 1];
      std::smatch match;
      if (std::regex_search(text, match, head)) names.insert(match.str(1) + "." + match.str(2));
    }
  }
  return names;
}

TEST(PeerCases, EveryNumberHasARowAndEveryNameIsATest) {
  static const std::regex row(R"(^\| (\d+) \|)"), span(R"(`(\w+\.\w+)`)");
  const std::set<std::string> tests = TestNames();
  std::set<std::string> named;
  std::set<int> numbers;
  {
    Violations violations("docs/peer-cases.md names a test that is not there");
    for (const SourceFile& file : Files()) {
      if (file.path != kDocument) continue;
      for (size_t i = 0; i < file.lines.size(); ++i) {
        const std::string& line = file.lines[i];
        std::smatch match;
        if (std::regex_search(line, match, row)) numbers.insert(std::stoi(match.str(1)));
        for (std::sregex_iterator it(line.begin(), line.end(), span), end; it != end; ++it) {
          named.insert((*it)[1].str());
          if (!tests.contains((*it)[1].str())) violations.Add(file, i + 1, (*it)[1].str());
        }
      }
    }
  }
  for (int number = 1; number <= kNumCases; ++number) {
    EXPECT_TRUE(numbers.contains(number)) << "no row " << number;
  }
  static const std::regex numbered(R"(\.Peers\d+_)");
  for (const std::string& test : tests) {
    std::smatch match;
    if (!std::regex_search(test, match, numbered)) continue;
    const int number = std::stoi(match.str().substr(6));
    if (number > kNumCases) continue;
    EXPECT_TRUE(named.contains(test)) << test << " has no row";
  }
}

}  // namespace
}  // namespace upipe::tidy
