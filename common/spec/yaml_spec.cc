#include "common/spec/yaml_spec.h"

#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/spec/hf_config.h"
#include "common/spec/job_spec.h"
#include "common/spec/model_rules.h"
#include "common/spec/yaml_message.h"
#include "common/status.h"
#include "common/utf8.h"

namespace upipe {
namespace {

void ReadOverride(absl::string_view text, YamlMessageReader& reader) {
  const std::string clean = ToUtf8(text, text.size());
  if (clean != text) {
    reader.Fail(YamlMessageReader::kOverride, "",
                absl::StrCat("'", clean, "' has bytes that are not part of UTF-8 text"));
  } else if (!absl::StrContains(text, '=')) {
    reader.Fail(YamlMessageReader::kOverride, "",
                absl::StrCat("'", ToUtf8(text, 80), "' has no '='; write path=value, e.g. ",
                             "train.steps=100"));
  } else {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    reader.Override(parts.first, parts.second);
  }
}

// Replaces model.hf_config by what the file says, below the fields that are given.
void ReadModelFile(const TextReader& read_text, YamlMessageReader& reader, v1::JobSpec& spec) {
  const v1::ModelSpec& model = spec.model();
  if (model.hf_config().empty() || read_text == nullptr) return;
  const std::string path = "model.hf_config";
  const int line = reader.LineOf(path);
  if (!model.preset().empty()) {
    reader.Fail(line, path,
                absl::StrCat("is given beside model.preset ", model.preset(), "; keep one"));
    return;
  }
  const absl::StatusOr<std::string> text = read_text(model.hf_config());
  if (!text.ok()) {
    reader.Fail(line, path, text.status().message());
    return;
  }
  v1::ModelSpec described;
  const std::vector<Violation> violations = ReadHfConfig(*text, described);
  for (const Violation& violation : violations) {
    reader.Fail(
        line, path,
        absl::StrCat(model.hf_config(), violation.field.empty() ? "" : ": ", violation.field,
                     violation.field.empty() ? " " : ": ", violation.message));
  }
  if (!violations.empty()) return;
  v1::ModelSpec full = LaidOver(described, model);
  full.clear_hf_config();
  *spec.mutable_model() = std::move(full);
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobSpecYaml(absl::string_view text, absl::string_view filename,
                                             const std::vector<std::string>& overrides,
                                             const TextReader& read_text) {
  v1::JobSpec spec;
  // A model's field that is not written came from its preset or file.
  YamlMessageReader reader(filename, "job", spec, {{"model", {"model.preset", "model.hf_config"}}});
  reader.ReadText(text, kMaxJobSpecBytes);
  for (const std::string& override_text : overrides) ReadOverride(override_text, reader);
  ReadModelFile(read_text, reader, spec);
  reader.FailAll(ValidateJobSpec(spec));
  UPIPE_RETURN_IF_ERROR(reader.status());
  return spec;
}

absl::StatusOr<v1::JobSpec> ReadJobSpecFile(const std::string& path,
                                            const std::vector<std::string>& overrides) {
  UPIPE_ASSIGN_OR_RETURN(const std::string text,
                         ReadTextFile(path, kMaxJobSpecBytes, "the job file "));
  return ParseJobSpecYaml(text, path, overrides, [&](const std::string& named) {
    const std::filesystem::path file = std::filesystem::path(path).parent_path() / named;
    return ReadTextFile(file.string(), kMaxHfConfigBytes, "");
  });
}

std::string JobSpecToYaml(const v1::JobSpec& spec) { return MessageToYaml(spec); }

}  // namespace upipe
