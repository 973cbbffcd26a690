#include "engine/checkpoint/verify.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "common/status.h"
#include "engine/checkpoint/job_folder.h"

namespace upipe::checkpoint {
namespace {

// A root holds jobs, a job generations, a generation steps.
constexpr int kDepthMax = 3;

bool IsStepName(absl::string_view name) {
  return name.size() > 1 && name[0] == 's' &&
         std::all_of(name.begin() + 1, name.end(), [](char c) { return absl::ascii_isdigit(c); });
}

Verdict VerdictOf(Folder folder) {
  Verdict verdict{.path = folder.path(), .status = absl::OkStatus(), .ref = {}};
  const auto verify = [&]() -> absl::Status {
    UPIPE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(std::move(folder)));
    verdict.ref = checkpoint->ref();
    return checkpoint->Verify();
  };
  verdict.status = verify();
  return verdict;
}

// By its name or, copied elsewhere under another, by its manifest.
bool IsCheckpoint(absl::string_view name, const Folder& folder) {
  if (IsStepName(name)) return true;
  const absl::StatusOr<std::vector<std::string>> names = folder.List();
  return names.ok() && std::find(names->begin(), names->end(), kManifestName) != names->end();
}

absl::Status Walk(const Folder& folder, int depth,
                  const std::function<void(const Verdict&)>& on_verdict) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<std::string> names, folder.List());
  for (const std::string& name : names) {
    absl::StatusOr<Folder> inner = folder.Open(name, /*make=*/false);
    if (!inner.ok()) continue;  // a file, or gone since
    if (IsCheckpoint(name, *inner)) {
      on_verdict(VerdictOf(*std::move(inner)));
    } else if (depth < kDepthMax) {
      UPIPE_RETURN_IF_ERROR(Walk(*inner, depth + 1, on_verdict));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status VerifyBelow(const std::string& path,
                         const std::function<void(const Verdict&)>& on_verdict) {
  UPIPE_ASSIGN_OR_RETURN(Folder folder, Folder::OpenRoot(path, /*make=*/false));
  const absl::string_view name =
      absl::string_view(folder.path()).substr(folder.path().rfind('/') + 1);
  if (IsCheckpoint(name, folder)) {
    on_verdict(VerdictOf(std::move(folder)));
    return absl::OkStatus();
  }
  return Walk(folder, 0, on_verdict);
}

}  // namespace upipe::checkpoint
