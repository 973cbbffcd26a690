#include "client/presets.h"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/commands.h"
#include "client/render.h"
#include "common/spec/model_presets.h"
#include "common/units.h"

namespace upipe::client {
namespace {

std::string PresetsJson() {
  nlohmann::ordered_json presets = nlohmann::json::array();
  for (const PresetInfo& preset : ModelPresets()) {
    presets.push_back({{"name", preset.name},
                       {"summary", preset.summary},
                       {"parameters", ParameterCount(preset.model)},
                       {"model", nlohmann::json::parse(RenderJsonLine(preset.model))}});
  }
  return nlohmann::ordered_json({{"presets", presets}}).dump(1) + "\n";
}

std::string PresetsTable() {
  std::vector<std::vector<std::string>> rows = {
      {"PRESET", "LAYERS", "d", "H", "K", "D", "F", "VOCAB", "PARAMETERS", "WHAT"}};
  for (const PresetInfo& preset : ModelPresets()) {
    const v1::ModelSpec& model = preset.model;
    rows.push_back({preset.name, absl::StrCat(model.num_layers()),
                    absl::StrCat(model.hidden_size()), absl::StrCat(model.num_heads()),
                    absl::StrCat(model.num_kv_heads()), absl::StrCat(model.head_dim()),
                    absl::StrCat(model.intermediate_size()), FormatCount(model.vocab_size()),
                    FormatCount(ParameterCount(model)), preset.summary});
  }
  return RenderTable(rows);
}

}  // namespace

int Presets(std::ostream& out, bool json) {
  out << (json ? PresetsJson() : PresetsTable());
  return kExitDone;
}

}  // namespace upipe::client
