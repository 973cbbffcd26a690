// What the documents promise exists: commands, links, and a comment for every field of the
// protocol.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "tests/tidy/tree/source_tree.h"

namespace upipe::tidy {
namespace {

std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> chunk;
  while (const size_t size = fread(chunk.data(), 1, chunk.size(), pipe))
    output.append(chunk.data(), size);
  pclose(pipe);
  return output;
}

bool HasWord(const std::string& text, const std::string& word) {
  return std::regex_search(text, std::regex("(^|[^\\w-])" + word + "([^\\w-]|$)"));
}

// Calls visit(file, line, text) for every line of a fenced block, and every `code span`, of every
// document.
template <typename Visit>
void ForEachCommandText(const Visit& visit) {
  static const std::regex span("`([^`]+)`");
  for (const SourceFile& file : Files()) {
    if (!file.path.ends_with(".md")) continue;
    bool fenced = false;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      if (line.starts_with("```")) {
        fenced = !fenced;
      } else if (fenced) {
        visit(file, i + 1, line);
      } else {
        for (std::sregex_iterator it(line.begin(), line.end(), span), end; it != end; ++it)
          visit(file, i + 1, (*it)[1].str());
      }
    }
  }
}

void CheckVerbs(const std::regex& command, const std::string& help, const std::string& rule) {
  ASSERT_FALSE(help.empty()) << rule;
  Violations violations(rule);
  int seen = 0;
  ForEachCommandText([&](const SourceFile& file, size_t line, const std::string& text) {
    std::smatch match;
    if (!std::regex_search(text, match, command)) return;
    ++seen;
    if (!HasWord(help, match[1].str())) violations.Add(file, line, text);
  });
  EXPECT_GT(seen, 0) << "no document names a command: " << rule;
}

TEST(Documents, DevCommandsExist) {
  CheckVerbs(std::regex(R"(^\s*(?:\$ )?\./dev ([a-z]+))"),
             OutputOf("'" + RepositoryRoot() + "/dev' --help"),
             "./dev --help does not know the verb");
}

TEST(Documents, UpipeCommandsExist) {
  const std::string binary = std::string(std::getenv("UPIPE_BIN_DIR")) + "/upipe";
  if (!std::filesystem::exists(binary)) GTEST_SKIP() << "the client is not built";
  CheckVerbs(std::regex(R"(^\s*(?:\$ )?(?:build/bin/)?upipe ([a-z][a-z-]*))"),
             OutputOf("'" + binary + "' --help"), "upipe --help does not know the verb");
}

std::string TextOf(const std::string& path) {
  std::ifstream file(std::filesystem::path(RepositoryRoot()) / path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// tools/fresh_machine.sh leaves the version of every package that dev installs.
TEST(Documents, TheFreshMachineHadTodaysPackages) {
  const std::string dev = TextOf("dev");
  std::smatch list;
  ASSERT_TRUE(std::regex_search(dev, list, std::regex(R"(\nPACKAGES=\(([^)]*)\))")));
  std::istringstream packages(list[1].str());
  std::set<std::string> proven;
  std::istringstream log(TextOf("docs/fresh-machine.log"));
  static const std::regex version(R"(^  ([a-z0-9][a-z0-9+.-]+) [0-9]\S*$)");
  std::smatch match;
  for (std::string line; std::getline(log, line);) {
    if (std::regex_match(line, match, version)) proven.insert(match[1].str());
  }
  std::string missing;
  int num_packages = 0;
  for (std::string package; packages >> package; ++num_packages) {
    if (!proven.contains(package)) missing += " " + package;
  }
  EXPECT_EQ(missing, "") << "not in docs/fresh-machine.log; run tools/fresh_machine.sh";
  EXPECT_GT(num_packages, 10);
}

TEST(Documents, RelativeLinksResolve) {
  static const std::regex link(R"(\]\(([^)\s#]+)[^)]*\))");
  Violations violations("a link leads nowhere");
  for (const SourceFile& file : Files()) {
    if (!file.path.ends_with(".md")) continue;
    const auto folder = (std::filesystem::path(RepositoryRoot()) / file.path).parent_path();
    for (size_t i = 0; i < file.lines.size(); ++i) {
      for (std::sregex_iterator it(file.lines[i].begin(), file.lines[i].end(), link), end;
           it != end; ++it) {
        const std::string target = (*it)[1].str();
        if (target.find("://") != std::string::npos) continue;
        if (!std::filesystem::exists(folder / target)) violations.Add(file, i + 1, target);
      }
    }
  }
}

// Explains a protocol file: which members say what they mean, themselves or through what holds
// them.
class ProtocolReader {
 public:
  // True when the line declares something that nothing explains.
  bool LacksComment(const std::string& line) {
    static const std::regex opens(R"(^\s*(message|enum|service|oneof)\s+(\w+)\s*\{)");
    static const std::regex member(
        R"(^\s*((optional|repeated)\s+)?([\w.<>, ]+\s+)?\w+\s*=\s*\d+\s*;|^\s*rpc\s+\w+)");
    const bool comment = line.find("//") != std::string::npos;
    const bool outer = !explained_.empty() && explained_.back();
    const bool closes = line.find('}') != std::string::npos;
    std::smatch match;
    bool lacks = false;
    if (std::regex_search(line, match, opens)) {
      if (!closes) explained_.push_back(outer || comment || above_ || IsCall(match[2].str()));
    } else if (std::regex_search(line, member) && !explained_.empty()) {
      lacks = !comment && !above_ && !outer && line.find("_UNSPECIFIED = 0") == std::string::npos;
    } else if (closes && !explained_.empty()) {
      explained_.pop_back();
    }
    static const std::regex only_comment(R"(^\s*//)");
    above_ = std::regex_search(line, only_comment);
    return lacks;
  }

 private:
  // The rpc of that name explains its request and response.
  static bool IsCall(const std::string& message) {
    return message.ends_with("Request") || message.ends_with("Response");
  }
  std::vector<bool> explained_;  // of what is open
  bool above_ = false;           // the line before is a comment
};

TEST(Documents, ProtocolIsExplained) {
  Violations violations("a field, value or call of the protocol that no comment explains");
  for (const SourceFile& file : Files()) {
    if (!file.path.ends_with(".proto")) continue;
    ProtocolReader reader;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      if (reader.LacksComment(file.lines[i])) violations.Add(file, i + 1, file.lines[i]);
    }
  }
}

TEST(Documents, ProtocolReaderSeesWhatIsMissing) {
  ProtocolReader reader;
  EXPECT_FALSE(reader.LacksComment("// What it is."));
  EXPECT_FALSE(reader.LacksComment("message Explained {"));
  EXPECT_FALSE(reader.LacksComment("  int32 field = 1;"));
  EXPECT_FALSE(reader.LacksComment("}"));
  EXPECT_FALSE(reader.LacksComment("message Bare {"));
  EXPECT_FALSE(reader.LacksComment("  int32 count = 1;  // how many"));
  EXPECT_TRUE(reader.LacksComment("  map<string, string> more = 2;"));
  EXPECT_FALSE(reader.LacksComment("}"));
}

}  // namespace
}  // namespace upipe::tidy
