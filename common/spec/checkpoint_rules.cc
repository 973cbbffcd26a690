#include "common/spec/checkpoint_rules.h"

#include "common/utf8.h"

namespace upipe {
namespace {

constexpr int64_t kPathBytesMax = 3072;  // job, generation, step and file names still fit
constexpr int32_t kKeepMax = 1000;

}  // namespace

v1::CheckpointSpec WithCheckpointDefaults(const v1::CheckpointSpec& checkpoint) {
  v1::CheckpointSpec full = checkpoint;
  if (full.path().empty()) return full;
  if (!full.has_every_steps()) full.set_every_steps(100);
  if (!full.has_keep()) full.set_keep(2);
  return full;
}

void CheckCheckpoint(const v1::CheckpointSpec& checkpoint, SpecChecker& checker) {
  const std::string& path = checkpoint.path();
  if (path.empty() && (checkpoint.has_every_steps() || checkpoint.has_keep())) {
    checker.Fail("checkpoint.path",
                 "is required in this section: an absolute folder that every worker reaches under "
                 "this name");
  } else if (!path.empty() && path[0] != '/') {
    checker.Fail("checkpoint.path",
                 absl::StrCat("must be absolute, for workers run in folders of their own; it is '",
                              ToUtf8(path, 80), "'"));
  } else if (path.find('\0') != std::string::npos) {
    checker.Fail("checkpoint.path", "contains a NUL character");
  } else if (static_cast<int64_t>(path.size()) > kPathBytesMax) {
    checker.Fail("checkpoint.path", absl::StrCat("has ", path.size(), " bytes, at most ",
                                                 kPathBytesMax, " leave room for file names"));
  }
  if (checkpoint.has_every_steps()) {
    checker.InRange("checkpoint.every_steps", checkpoint.every_steps(), 1, int64_t{1} << 31);
  }
  if (checkpoint.has_keep()) checker.InRange("checkpoint.keep", checkpoint.keep(), 1, kKeepMax);
}

}  // namespace upipe
