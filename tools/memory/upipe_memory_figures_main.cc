// upipe-memory-figures: writes the tables of docs/memory.md and docs/pictures/memory-by-context.svg
// anew.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/parse_arguments.h"
#include "common/status.h"
#include "tools/memory/memory_figures.h"

namespace upipe::memory {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  if (!in || !(text << in.rdbuf())) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  return text.str();
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  if (!(out << text) || !out.flush()) {
    return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::Status WriteFigures(const std::string& docs) {
  const std::string page = docs + "/memory.md";
  UPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(page));
  UPIPE_ASSIGN_OR_RETURN(const Figures figures, MakeFigures());
  UPIPE_ASSIGN_OR_RETURN(const std::string filled, Filled(text, figures.tables));
  UPIPE_RETURN_IF_ERROR(WriteFile(page, filled));
  return WriteFile(docs + "/pictures/memory-by-context.svg", figures.picture);
}

int Main(int argc, char** argv) {
  CLI::App app{"Writes the tables of memory.md and pictures/memory-by-context.svg anew."};
  std::string docs = "docs";
  app.add_option("docs", docs, "folder of memory.md, default: docs")->check(CLI::ExistingDirectory);
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  const absl::Status status = WriteFigures(docs);
  if (status.ok()) return 0;
  std::cerr << "upipe-memory-figures: " << status.message() << "\n";
  return 1;
}

}  // namespace
}  // namespace upipe::memory

int main(int argc, char** argv) { return upipe::memory::Main(argc, argv); }
