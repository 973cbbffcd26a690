// Published model shapes by name, and small ones of our own for a laptop: what `model.preset` means
// and what `upipe presets` lists.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

struct PresetInfo {
  std::string name;     // lower case, digits, '.', '-'
  std::string summary;  // one line: whose shape it is
  v1::ModelSpec model;  // only what differs from the defaults of job.proto; preset not set
};

// All of them, in the order to list them. Built once; thread safe.
const std::vector<PresetInfo>& ModelPresets();

// The shape of that name. NotFound names the nearest preset, or all of them.
absl::StatusOr<v1::ModelSpec> ModelPreset(absl::string_view name);

// Trainable parameters of a model whose sizes are set; a tied embedding counts once.
int64_t ParameterCount(const v1::ModelSpec& model);

}  // namespace upipe
