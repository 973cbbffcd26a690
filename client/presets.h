// `upipe presets`: the model shapes a job file can name, from common/spec; no coordinator needed.
#pragma once

#include <ostream>

namespace upipe::client {

// A table, or {"presets": [{"name", "summary", "parameters", "model"}]}. Returns the exit code.
int Presets(std::ostream& out, bool json);

}  // namespace upipe::client
