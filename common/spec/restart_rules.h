// What the restarts section, the priority and the time limit of a job mean.
#pragma once

#include "common/spec/spec_checker.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Every absent field at the default job.proto writes at it.
v1::RestartSpec WithRestartDefaults(const v1::RestartSpec& restarts);

// The violations of restarts, priority and time_limit_seconds, with or without defaults.
void CheckRestarts(const v1::JobSpec& spec, SpecChecker& checker);

}  // namespace upipe
