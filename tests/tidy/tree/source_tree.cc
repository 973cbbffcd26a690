#include "tests/tidy/tree/source_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

namespace upipe::tidy {
namespace {

constexpr std::array kTextEndings = {".h",   ".cc",    ".cu",  ".cuh", ".proto", ".md",  ".yaml",
                                     ".yml", ".cmake", ".txt", ".sh",  ".py",    ".json"};

bool IsText(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  if (name == "dev" || name == "run") return true;
  return std::any_of(kTextEndings.begin(), kTextEndings.end(),
                     [&name](const std::string& ending) { return name.ends_with(ending); });
}

// Folders that are made, not written.
bool IsLeftOut(const std::string& path) {
  static const std::regex left_out(
      R"(^(build|build-[^/]*|out|\.git|\.venv|shared)$|(^|/)(__pycache__|corpus|\.venv)$)");
  return std::regex_search(path, left_out);
}

SourceFile Read(const std::string& root, const std::string& path) {
  SourceFile file{.path = path, .lines = {}, .code = {}};
  std::ifstream in(root + "/" + path);
  for (std::string line; std::getline(in, line);) file.lines.push_back(line);
  if (file.IsCpp()) file.code = BlankOut(file.lines);
  return file;
}

std::vector<SourceFile> ReadAll() {
  const std::string root = RepositoryRoot();
  std::vector<std::string> paths;
  for (std::filesystem::recursive_directory_iterator it(root), end; it != end; ++it) {
    const std::string path = std::filesystem::relative(it->path(), root).string();
    if (it->is_directory() && IsLeftOut(path)) it.disable_recursion_pending();
    if (it->is_regular_file() && IsText(it->path())) paths.push_back(path);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<SourceFile> files;
  for (const std::string& path : paths) files.push_back(Read(root, path));
  return files;
}

// Walks C++ text and says which characters are code.
class Blanker {
 public:
  std::string Line(const std::string& line) {
    std::string out = line;
    for (size_t i = 0; i < line.size(); ++i) {
      if (!raw_end_.empty()) {
        i = SkipRaw(line, i, out);
      } else if (in_comment_) {
        if (line.compare(i, 2, "*/") == 0) {
          in_comment_ = false;
          out[i] = out[i + 1] = ' ';
          ++i;
        } else {
          out[i] = ' ';
        }
      } else {
        i = Code(line, i, out);
      }
    }
    return out;
  }

 private:
  size_t Code(const std::string& line, size_t i, std::string& out) {
    if (line.compare(i, 2, "//") == 0) {
      std::fill(out.begin() + static_cast<std::ptrdiff_t>(i), out.end(), ' ');
      return line.size();
    }
    if (line.compare(i, 2, "/*") == 0) {
      in_comment_ = true;
      out[i] = out[i + 1] = ' ';
      return i + 1;
    }
    if (line.compare(i, 2, "R\"") == 0 &&
        (i == 0 || std::isalnum(static_cast<unsigned char>(line[i - 1])) == 0)) {
      const size_t open = line.find('(', i);
      raw_end_ = ")" + line.substr(i + 2, open - i - 2) + "\"";
      std::fill(out.begin() + static_cast<std::ptrdiff_t>(i),
                out.begin() + static_cast<std::ptrdiff_t>(open) + 1, ' ');
      return open;
    }
    const bool separates_digits =
        line[i] == '\'' && i > 0 && std::isxdigit(static_cast<unsigned char>(line[i - 1])) != 0;
    if (line[i] == '"' || (line[i] == '\'' && !separates_digits)) return SkipLiteral(line, i, out);
    return i;
  }

  static size_t SkipLiteral(const std::string& line, size_t i, std::string& out) {
    const char quote = line[i];
    for (++i; i < line.size() && line[i] != quote; ++i) {
      if (line[i] == '\\' && i + 1 < line.size()) out[i++] = ' ';
      out[i] = ' ';
    }
    return i;
  }

  size_t SkipRaw(const std::string& line, size_t i, std::string& out) {
    const size_t end = line.find(raw_end_, i);
    const size_t stop = end == std::string::npos ? line.size() : end + raw_end_.size();
    std::fill(out.begin() + static_cast<std::ptrdiff_t>(i),
              out.begin() + static_cast<std::ptrdiff_t>(stop), ' ');
    if (end != std::string::npos) raw_end_.clear();
    return stop - 1;
  }

  bool in_comment_ = false;
  std::string raw_end_;  // what closes the raw string we are in
};

bool OpensFunction(const std::string& head) {
  static const std::regex no_function(
      R"((^|[^\w])(namespace|class|struct|enum|union|extern)\s|=\s*$|)"
      R"(^\s*(if|for|while|switch|do|else|try)\b)");
  return head.find('(') != std::string::npos && !std::regex_search(head, no_function);
}

}  // namespace

bool SourceFile::IsCpp() const {
  return path.ends_with(".h") || path.ends_with(".cc") || path.ends_with(".cu") ||
         path.ends_with(".cuh");
}

bool SourceFile::IsBelow(const std::string& folder) const { return path.starts_with(folder); }

std::string RepositoryRoot() {
  const char* root = std::getenv("UPIPE_SOURCE_DIR");
  if (root == nullptr)
    throw std::runtime_error("UPIPE_SOURCE_DIR is not set: run this test with ctest");
  return root;
}

const std::vector<SourceFile>& Files() {
  static const std::vector<SourceFile> files = ReadAll();
  return files;
}

std::vector<std::string> BlankOut(const std::vector<std::string>& lines) {
  Blanker blanker;
  std::vector<std::string> code;
  for (const std::string& line : lines) code.push_back(blanker.Line(line));
  return code;
}

std::vector<FunctionSpan> Functions(const std::vector<std::string>& code) {
  std::vector<FunctionSpan> found;
  std::vector<FunctionSpan> open;  // a head of "" is no function
  std::string head;
  int parentheses = 0, inside = 0;  // `inside`: open functions
  for (size_t i = 0; i < code.size(); ++i) {
    if (code[i].starts_with('#')) continue;
    for (const char c : code[i]) {
      if (c == '(') ++parentheses;
      if (c == ')') --parentheses;
      if (c == '{') {
        const bool function = inside == 0 && parentheses == 0 && OpensFunction(head);
        if (function) ++inside;
        open.push_back({static_cast<int>(i) + 1, 0, function ? head : ""});
      } else if (c == '}' && !open.empty()) {
        if (!open.back().head.empty()) {
          --inside;
          open.back().last_line = static_cast<int>(i) + 1;
          found.push_back(open.back());
        }
        open.pop_back();
      }
      const bool ends_head = (c == '{' || c == '}' || c == ';') && parentheses == 0;
      if (ends_head)
        head.clear();
      else
        head += c;
    }
    if (!head.empty()) head += ' ';
  }
  return found;
}

void Violations::Add(const SourceFile& file, size_t line, const std::string& what) {
  std::ostringstream text;
  text << "  " << file.path << ":" << line << ": " << what << "\n";
  text_ += text.str();
  ++count_;
}

Violations::~Violations() {
  if (count_ > 0) ADD_FAILURE() << rule_ << ": " << count_ << " violations\n" << text_;
}

}  // namespace upipe::tidy
