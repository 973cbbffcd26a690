// Strict YAML to JobSpec and back: a walk over the protobuf descriptors, so every field of
// job.proto is reachable by its own name and nothing else is accepted. The only parser of job
// files; input is untrusted.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Largest job file accepted; bounds nodes and time.
inline constexpr size_t kMaxJobSpecBytes = 64 * 1024;

// Parses and validates one job file. `overrides` are "path=value" as `--set` takes them
// ("parallel.heads_per_stage=8"), applied in order over the file; the value is the text after the
// first '='. Returns a spec that ValidateJobSpec accepts, without defaults filled in; or
// InvalidArgument with every violation, one per line: "<filename>:<line>: <field path>: <what is
// wrong>", or "--set: <field path>: ...".
absl::StatusOr<v1::JobSpec> ParseJobSpecYaml(absl::string_view text, absl::string_view filename,
                                             const std::vector<std::string>& overrides = {});

// Reads `path` and parses it. NotFound or PermissionDenied names the path and the reason.
absl::StatusOr<v1::JobSpec> ReadJobSpecFile(const std::string& path,
                                            const std::vector<std::string>& overrides = {});

// The fields that are set, in the form ParseJobSpecYaml reads back to an equal message.
std::string JobSpecToYaml(const v1::JobSpec& spec);

}  // namespace upipe
