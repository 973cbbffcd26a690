// Text from elsewhere on a terminal: as wide as it is said to be, and unable to move the cursor.
// Pure.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace upipe::client {

// Columns that `text` takes on a terminal, once fitted.
size_t ColumnsOf(absl::string_view text);

// `text` on one line of at most `width` columns: control characters, also those of other alphabets
// and directions, become spaces, bytes that are no UTF-8 '?'. What does not fit is cut between
// characters.
std::string Fitted(absl::string_view text, size_t width);

// The same, with spaces up to exactly `width` columns.
std::string Padded(absl::string_view text, size_t width);

}  // namespace upipe::client
