// Who may include whom (docs/architecture.md): arrows between rooms, and third-party headers in
// their own folder only.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <regex>
#include <set>

#include "tests/tidy/tree/source_tree.h"

namespace upipe::tidy {
namespace {

const std::regex kQuoted(R"(^\s*#\s*include\s+"([^"]+)\")");
const std::regex kAngled(R"(^\s*#\s*include\s+[<"]([^>"]+)[>"])");

std::string RoomOf(const std::string& path) { return path.substr(0, path.find('/')); }

std::optional<std::string> Included(const std::string& line, const std::regex& form) {
  std::smatch match;
  if (!std::regex_search(line, match, form)) return std::nullopt;
  return match[1].str();
}

// Longest prefix wins. "upipe" stands for the generated messages (proto/).
const std::map<std::string, std::set<std::string>>& Arrows() {
  static const std::map<std::string, std::set<std::string>> arrows = {
      {"common/", {"common"}},
      {"common/errors/", {"common", "upipe"}},
      {"common/metrics/", {"common", "upipe"}},
      {"common/report/", {"common", "upipe"}},
      {"common/spec/", {"common", "upipe"}},
      {"common/trace/", {"common", "upipe"}},
      {"kernels/", {"common", "kernels"}},
      {"engine/", {"common", "kernels", "engine", "upipe"}},
      {"planner/", {"common", "kernels", "engine", "planner", "upipe"}},
      {"coordinator/", {"common", "coordinator", "upipe"}},
      {"worker/", {"common", "worker", "upipe"}},
      {"worker/trainer_main.cc", {"common", "kernels", "engine", "worker", "upipe"}},
      {"client/", {"common", "client", "upipe"}},
      {"tools/", {"common", "kernels", "engine", "planner", "tools", "upipe"}},
      // Documents what the daemons serve.
      {"tools/metrics/", {"common", "coordinator", "worker"}},
      // Runs the project's own test suites on a GPU.
      {"tools/gpu_check/", {"common", "kernels", "engine", "planner", "tools", "tests", "upipe"}},
  };
  return arrows;
}

const std::set<std::string>* Allowed(const std::string& path) {
  const std::set<std::string>* allowed = nullptr;
  size_t longest = 0;
  for (const auto& [prefix, rooms] : Arrows()) {
    if (!path.starts_with(prefix) || prefix.size() < longest) continue;
    longest = prefix.size();
    allowed = &rooms;
  }
  return allowed;
}

TEST(IncludeArrows, BetweenRooms) {
  static const std::set<std::string> rooms = {"common",      "kernels", "engine", "planner",
                                              "coordinator", "worker",  "client", "tools",
                                              "tests",       "upipe"};
  Violations violations("a room includes one it may not know");
  for (const SourceFile& file : Files()) {
    const std::set<std::string>* allowed = file.IsCpp() ? Allowed(file.path) : nullptr;
    if (allowed == nullptr) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const auto included = Included(file.lines[i], kQuoted);
      if (!included || !rooms.contains(RoomOf(*included)) || allowed->contains(RoomOf(*included)))
        continue;
      violations.Add(file, i + 1, *included);
    }
  }
}

// Inside a room: the folder at the left may be entered by these only.
TEST(IncludeArrows, SeamsInsideRooms) {
  struct Seam {
    std::string from;
    std::vector<std::string> only;
  };
  const std::vector<Seam> seams = {
      {"kernels/api/", {"common/", "kernels/api/"}},
      {"kernels/reference/", {"common/", "kernels/api/", "kernels/host/", "kernels/reference/"}},
      {"engine/parallel/", {"common/", "kernels/api/", "engine/parallel/", "upipe/v1/"}},
      {"coordinator/core/",
       {"common/", "coordinator/core/", "coordinator/store/store.h", "upipe/v1/"}},
      {"worker/agent/", {"common/", "worker/agent/", "upipe/v1/"}},
  };
  Violations violations("a folder includes more than its seam");
  for (const SourceFile& file : Files()) {
    for (const Seam& seam : seams) {
      if (!file.IsCpp() || !file.IsBelow(seam.from)) continue;
      for (size_t i = 0; i < file.lines.size(); ++i) {
        const auto included = Included(file.lines[i], kQuoted);
        if (!included || included->find('/') == std::string::npos || RoomOf(*included) == "absl" ||
            RoomOf(*included) == "google" || RoomOf(*included) == "hwy") {
          continue;
        }
        const bool fine =
            std::any_of(seam.only.begin(), seam.only.end(),
                        [&](const std::string& prefix) { return included->starts_with(prefix); });
        if (!fine) violations.Add(file, i + 1, *included);
      }
    }
  }
}

TEST(IncludeArrows, LibrariesStayInTheirFolder) {
  struct Library {
    std::string name;
    std::regex header;
    std::regex home;
  };
  const std::vector<Library> libraries = {
      {"gRPC", std::regex(R"(^grpc(pp)?/|\.grpc\.pb\.h$)"),
       std::regex(R"((^|/)rpc/|^worker/trainer_main\.cc$|^(tests|benchmarks/coordinator)/)")},
      {"CUDA", std::regex("^(cuda|cublas|cudnn|nvrtc)"),
       std::regex(R"(^(kernels/cuda|engine/comm/nccl|tests/kernels|tests/support/cuda_emulator)/)"
                  R"(|^tools/gpu_check/(exact_row_sums|on_device_))")},
      {"NCCL", std::regex("^nccl"), std::regex("^engine/comm/nccl/")},
      {"UCX", std::regex("^uc[pst]/"), std::regex("^(engine/comm/ucx|tests/contract/engine)/")},
      {"OpenBLAS", std::regex("^(cblas|openblas)"),
       std::regex("^(kernels/cpu|benchmarks/kernels)/")},
      {"Highway", std::regex("^hwy/"),
       std::regex("^(kernels/cpu|tests/kernels|benchmarks/kernels)/")},
      {"SQLite", std::regex(R"(^sqlite3\.h)"), std::regex("^(coordinator/store|tests/)")},
      {"yaml-cpp", std::regex("^yaml-cpp/"), std::regex("^common/spec/")},
      {"prometheus-cpp", std::regex("^prometheus/"),
       std::regex("^common/metrics/|^tests/")},
      {"CLI11", std::regex("^CLI/"),
       std::regex(R"(main\.cc$|^client/command_line|^common/parse_arguments|^benchmarks/)")},
  };
  Violations violations("a library's headers outside its folder");
  for (const SourceFile& file : Files()) {
    if (!file.IsCpp()) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const auto included = Included(file.lines[i], kAngled);
      if (!included) continue;
      for (const Library& library : libraries) {
        if (std::regex_search(*included, library.header) &&
            !std::regex_search(file.path, library.home)) {
          violations.Add(file, i + 1, library.name + ": " + *included);
        }
      }
    }
  }
}

}  // namespace
}  // namespace upipe::tidy
