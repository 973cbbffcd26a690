#include "common/spec/restart_rules.h"

namespace upipe {
namespace {

constexpr int64_t kMaxRestarts = 1'000'000;
constexpr int64_t kMaxPriority = 1000;
constexpr int64_t kMaxTimeLimitSeconds = int64_t{10} * 365 * 24 * 3600;

}  // namespace

v1::RestartSpec WithRestartDefaults(const v1::RestartSpec& restarts) {
  v1::RestartSpec full = restarts;
  if (!full.has_infrastructure()) full.set_infrastructure(100);
  if (!full.has_application()) full.set_application(3);
  if (!full.has_no_progress()) full.set_no_progress(3);
  return full;
}

void CheckRestarts(const v1::JobSpec& spec, SpecChecker& checker) {
  const v1::RestartSpec& restarts = spec.restarts();
  checker.InRange("restarts.infrastructure", restarts.infrastructure(), 0, kMaxRestarts);
  checker.InRange("restarts.application", restarts.application(), 0, kMaxRestarts);
  checker.InRange("restarts.no_progress", restarts.no_progress(), 0, kMaxRestarts);
  checker.InRange("priority", spec.priority(), -kMaxPriority, kMaxPriority);
  if (spec.has_time_limit_seconds()) {
    checker.InRange("time_limit_seconds", spec.time_limit_seconds(), 1, kMaxTimeLimitSeconds);
  }
}

}  // namespace upipe
