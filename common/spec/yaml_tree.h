// One YAML document as a plain tree with line numbers: what the field walk reads. Separate from it
// because only this part touches yaml-cpp, and because everything about untrusted text is refused
// here: bytes that are no UTF-8, tabs, control characters, aliases (with them bombs and cycles),
// tags, further documents. Depth is bounded by yaml-cpp's own guard, size by the caller.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace upipe {

struct YamlNode {
  enum class Kind { kNull, kScalar, kMap, kSequence };
  Kind kind = Kind::kNull;
  int line = 0;         // 1-based
  bool quoted = false;  // of a scalar: 'x', "x" or a block
  std::string scalar;
  std::vector<YamlNode> children;  // of a map: key, value, key, value, ..
};

struct YamlError {
  int line = 0;
  std::string message;
};

// Parses `text`, which describes one `noun`. Returns every error found; `root` is the document when
// there is none.
std::vector<YamlError> ParseYamlTree(absl::string_view text, absl::string_view noun,
                                     YamlNode& root);

}  // namespace upipe
