// What the model section of a job means: presets laid under what is written, defaults, the rules of
// sizes, masks and RoPE scaling. Apart from job_spec because a preset, a Hugging Face file and a
// job file all end in the same ModelSpec.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/spec/spec_checker.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// `base` with what `given` sets: optional fields that are present, other scalars that are not 0.
// `given` with a RoPE scaling of another kind drops the one of `base`.
v1::ModelSpec LaidOver(const v1::ModelSpec& base, const v1::ModelSpec& given);

// `model` over its preset, where that is known, with every default of job.proto. `preset` stays.
v1::ModelSpec WithModelDefaults(const v1::ModelSpec& model);

// The violations of `model`, which is WithModelDefaults.
void CheckModel(const v1::ModelSpec& model, SpecChecker& checker);

// Legal but unlikely to be meant: a context beyond the positions the model was trained for, or that
// its RoPE scaling reaches; a window that hides nothing; a mask that hides no label. `model` is
// WithModelDefaults and has no violations.
std::vector<std::string> ModelWarnings(const v1::ModelSpec& model, int64_t context);

}  // namespace upipe
