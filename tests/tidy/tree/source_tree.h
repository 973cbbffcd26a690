// The repository as the tidy tests see it: its text files, C++ with comments and literals blanked
// out, and where functions begin and end. A light lexer for this tree's own style, no compiler.
#pragma once

#include <string>
#include <vector>

namespace upipe::tidy {

struct SourceFile {
  std::string path;  // relative to the repository, "kernels/api/dtype.h"
  std::vector<std::string> lines;
  std::vector<std::string>
      code;  // C++ only: lines with comments and what stands between quotes as spaces

  bool IsCpp() const;
  bool IsBelow(const std::string& folder) const;  // "engine/comm/" or a file's own path
};

// Every text file of the repository, sorted by path: build trees, run outputs, binary data and .git
// left out.
const std::vector<SourceFile>& Files();
std::string RepositoryRoot();

// The lines with comments, string and character literals replaced by spaces; raw strings too.
std::vector<std::string> BlankOut(const std::vector<std::string>& lines);

struct FunctionSpan {
  int first_line = 0;  // 1-based, of the opening brace
  int last_line = 0;
  std::string head;  // what stands before the brace
  int Length() const { return last_line - first_line + 1; }
};
// Outermost functions of blanked C++; lambdas and local classes belong to the function around them.
std::vector<FunctionSpan> Functions(const std::vector<std::string>& code);

// Collects "path:line: what" and fails once with all of them.
class Violations {
 public:
  explicit Violations(std::string rule) : rule_(std::move(rule)) {}
  ~Violations();
  void Add(const SourceFile& file, size_t line, const std::string& what);  // line 1-based
 private:
  std::string rule_;
  std::string text_;
  int count_ = 0;
};

}  // namespace upipe::tidy
