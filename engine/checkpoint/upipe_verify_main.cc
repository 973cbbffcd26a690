// upipe-verify: reads every checkpoint below a folder and says which are whole, and what they hold.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "common/parse_arguments.h"
#include "common/units.h"
#include "engine/checkpoint/verify.h"

namespace upipe::checkpoint {
namespace {

constexpr int kDamaged = 1;
constexpr int kUsage = 2;
constexpr int kNone = 3;

int Main(int argc, char** argv) {
  CLI::App app{
      "Reads every checkpoint below PATH: a checkpoint root, a job's folder, or one checkpoint.\n"
      "Prints a line for each: whole, unfinished or damaged, and content_sha256, which is equal "
      "for\n"
      "equal bits whoever wrote them. Exit code 0: every one that was finished is whole; 1: one "
      "is\n"
      "damaged; 2: PATH cannot be read; 3: there is no whole one.\n"
      "Example: upipe verify /data/checkpoints/demo-x3kqab"};
  std::string path;
  bool quiet = false;
  app.add_option("path", path, "folder")->required();
  app.add_flag("--quiet", quiet, "print nothing but the content_sha256 of each whole checkpoint");
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  int whole = 0;
  int damaged = 0;
  const absl::Status status =
      VerifyBelow(std::filesystem::absolute(path).lexically_normal(), [&](const Verdict& verdict) {
        if (verdict.status.ok()) {
          ++whole;
          std::cout << (quiet ? verdict.ref.content_sha256()
                              : absl::StrCat("whole       ", verdict.path, "  step ",
                                             verdict.ref.step(), "  ",
                                             FormatBytes(verdict.ref.bytes()), "  content_sha256 ",
                                             verdict.ref.content_sha256()))
                    << "\n";
          return;
        }
        const bool unfinished = absl::IsNotFound(verdict.status);
        if (!unfinished) ++damaged;
        if (quiet) return;
        std::cout << (unfinished ? "unfinished  " : "damaged     ") << verdict.path << "  "
                  << verdict.status.message() << "\n";
      });
  if (!status.ok()) {
    std::cerr << "upipe-verify: " << status.message() << "\n";
    return kUsage;
  }
  if (damaged > 0) return kDamaged;
  if (whole > 0) return 0;
  std::cerr << "upipe-verify: no whole checkpoint below " << path << "\n";
  return kNone;
}

}  // namespace
}  // namespace upipe::checkpoint

int main(int argc, char** argv) { return upipe::checkpoint::Main(argc, argv); }
