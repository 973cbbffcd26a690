// A Hugging Face config.json read as a ModelSpec, strictly: a key that changes the mathematics and
// is not supported, or that is not known, is refused by its name. Input is untrusted. What an
// absent key means is what transformers (5.x) takes for that model_type.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/spec/violation.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Largest config.json accepted; bounds nodes and time.
inline constexpr size_t kMaxHfConfigBytes = 256 * 1024;

// Sets `model` to what `json` says. Returns everything wrong with it, with keys as fields
// ("rope_scaling.rope_type"; empty for the text as a whole), printable on one line each; `model` is
// complete only when there is nothing. Ranges of sizes are left to ValidateJobSpec.
std::vector<Violation> ReadHfConfig(absl::string_view json, v1::ModelSpec& model);

}  // namespace upipe
