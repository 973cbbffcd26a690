// One thing wrong with one field: how every check of a specification reports.
#pragma once

#include <string>

namespace upipe {

// `field` is a path of proto names ("parallel.heads_per_stage") or of keys of a file; `message`
// gives the numbers and what would be right, without the path.
struct Violation {
  std::string field;
  std::string message;
};

}  // namespace upipe
