// Strict YAML to JobSpec and back. The only parser of job files; input is untrusted. The walk over
// fields is common/spec/yaml_message.h; here is what job files have beyond it: overrides, the
// model's own file, the rules of a job.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/job.pb.h"

namespace upipe {

// Largest job file accepted; bounds nodes and time.
inline constexpr size_t kMaxJobSpecBytes = 64 * 1024;

// Returns the text of a file that a job file names, or why it cannot be read.
using TextReader = std::function<absl::StatusOr<std::string>(const std::string& path)>;

// Parses and validates one job file. `overrides` are "path=value" as `--set` takes them
// ("parallel.heads_per_stage=8"), applied in order over the file; the value is the text after the
// first '=', and an empty one unsets the field or section. model.hf_config is read with `read_text`
// and replaced by the fields it stands for; without a reader it is a violation. Returns a spec that
// ValidateJobSpec accepts, without defaults filled in; or InvalidArgument with every violation in
// the order of lines, one each, overrides last:
//   <filename>:<line>: <field path>: <what is wrong>
//   --set: <field path>: <what is wrong>
absl::StatusOr<v1::JobSpec> ParseJobSpecYaml(absl::string_view text, absl::string_view filename,
                                             const std::vector<std::string>& overrides = {},
                                             const TextReader& read_text = nullptr);

// Reads `path` and parses it; model.hf_config is relative to the folder of `path`. NotFound or
// PermissionDenied names the path and the reason.
absl::StatusOr<v1::JobSpec> ReadJobSpecFile(const std::string& path,
                                            const std::vector<std::string>& overrides = {});

// The fields that are set, in the form ParseJobSpecYaml reads back to an equal message.
std::string JobSpecToYaml(const v1::JobSpec& spec);

}  // namespace upipe
