// One object of an untrusted JSON file, read key by key: each read marks its key as known, and what
// was never asked for is refused by name at the end. Separate from hf_config, which says what the
// keys mean; only these two touch the JSON library here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/spec/violation.h"

namespace upipe {

// Parses `text` to an object without duplicate keys, at most 8 levels deep. Reports why not.
bool ParseJsonObject(absl::string_view text, nlohmann::json& root,
                     std::vector<Violation>& violations);

// A value or key as it is shown in messages: one printable line, shortened.
std::string ShownJson(const nlohmann::json& value);

// Both references must outlive the section. Not thread safe.
class JsonSection {
 public:
  // `path` is the object's own key, or "" for the whole file.
  JsonSection(const nlohmann::json& object, std::string path, std::vector<Violation>& violations)
      : object_(object), path_(std::move(path)), violations_(violations) {}

  // The value at `key`; nullptr when it is absent or null.
  const nlohmann::json* Find(const char* key);
  bool IsNull(const char* key) const;  // present, with the value null

  // The value at `key`, or `absent` when it is absent, null or wrong; wrong is reported.
  int64_t Size(const char* key, int64_t absent);    // a whole number from 1 to 2^40
  double Positive(const char* key, double absent);  // a finite number above 0
  bool Flag(const char* key, bool absent);
  std::string Text(const char* key, absl::string_view absent);

  // Reports `key` with `why` when it is there and is not the one value that is supported.
  void MustBe(const char* key, const nlohmann::json& value, absl::string_view why);

  void Fail(absl::string_view key, std::string message);
  void Ignore(const std::vector<absl::string_view>& keys);

  // Reports every key that was neither read nor ignored, except those that are null.
  void RefuseTheRest();

 private:
  const nlohmann::json& object_;
  const std::string path_;
  std::vector<Violation>& violations_;
  std::set<std::string> known_;
};

}  // namespace upipe
