// Identifiers nobody can guess or collide with: attempt nonces, request ids, job ids. From the
// kernel's random source, never from a seed: training randomness lives in the engine.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace upipe {

// 128 random bits as 32 lower-case hex digits. Thread-safe.
std::string RandomNonce();

// "<name>-<6 characters of a-z, 2-7>", e.g. "demo-x3kqab"; 30 random bits, so the caller checks
// that it is unused.
std::string NewJobId(absl::string_view name);

}  // namespace upipe
