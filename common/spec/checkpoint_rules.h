// What the checkpoint section of a job means.
#pragma once

#include "common/spec/spec_checker.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Every absent field at the default job.proto writes at it, where there is a path.
v1::CheckpointSpec WithCheckpointDefaults(const v1::CheckpointSpec& checkpoint);

// The violations of a section, with or without defaults.
void CheckCheckpoint(const v1::CheckpointSpec& checkpoint, SpecChecker& checker);

}  // namespace upipe
