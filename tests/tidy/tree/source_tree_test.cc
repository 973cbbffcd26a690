// The lexer itself: every other tidy test rests on it.
#include "tests/tidy/tree/source_tree.h"

#include <gtest/gtest.h>

namespace upipe::tidy {
namespace {

TEST(SourceTree, ReadsTheWholeRepository) {
  const auto& files = Files();
  EXPECT_GT(files.size(), 100u);
  for (const char* expected :
       {"dev", "CMakeLists.txt", "proto/upipe/v1/job.proto", "kernels/api/op_table.h"}) {
    EXPECT_TRUE(std::any_of(files.begin(), files.end(), [&](const SourceFile& f) {
      return f.path == expected;
    })) << expected;
  }
}

TEST(SourceTree, BlanksCommentsAndLiterals) {
  const std::vector<std::string> code =
      BlankOut({R"(int a = 1;  // system("x"))", R"(Call("system(", 'x', 1'000);)", "a /* {",
                "} */ b", "R\"(", "{ \" )\" c"});
  EXPECT_EQ(code[0], "int a = 1;                ");
  EXPECT_EQ(code[1], R"(Call("       ", ' ', 1'000);)");
  EXPECT_EQ(code[2], "a     ");
  EXPECT_EQ(code[3], "     b");
  EXPECT_EQ(code[5], "       c");
}

TEST(SourceTree, FindsFunctionsAndTheirLengths) {
  const std::vector<FunctionSpan> functions = Functions(BlankOut({
      "namespace a {",
      "struct S {",
      "  S(int x) : x_(x) {}",
      "  int x_ = 0;",
      "};",
      "void Long(int a,",
      "          int b) {",
      "  if (a) {",
      "    auto f = [](int c) { return c; };",
      "  }",
      "}",
      "constexpr int kTable[] = {1, 2};",
      "}  // namespace a",
  }));
  ASSERT_EQ(functions.size(), 2u);
  EXPECT_EQ(functions[0].Length(), 1);
  EXPECT_EQ(functions[1].first_line, 7);
  EXPECT_EQ(functions[1].Length(), 5);
}

}  // namespace
}  // namespace upipe::tidy
