// Text documents from files and folders: a deterministic walk, and the line between text and
// binary.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace upipe::data {

// One file.
struct TextDocument {
  std::string relative_path;  // below the folder that was named; the file name of a named file
  std::string text;           // not empty
};

// What CollectTexts found.
struct TextCollection {
  std::vector<TextDocument> documents;
  int64_t bytes = 0;               // of all documents together
  bool reached_max_bytes = false;  // the rest was not looked at, the last document may be cut
  // Files met inside folders and passed over.
  int64_t skipped_binary = 0;     // not text, as CheckIsText decides
  int64_t skipped_empty = 0;      // 0 bytes
  int64_t skipped_special = 0;    // symbolic links, devices, sockets, pipes
  int64_t skipped_duplicate = 0;  // the same file again, by another name or hard link
};

// OK for text: no NUL byte and at most 10 % of the bytes outside well-formed UTF-8 (a sequence cut
// off at the end is not counted). InvalidArgument names `name` and the number that decided.
absl::Status CheckIsText(absl::string_view bytes, absl::string_view name);

// Reads `inputs` in order, each a file or a folder, until `max_bytes` (at least 1) are collected.
// Folders are walked recursively in ascending byte order of names; symbolic links are followed when
// named in `inputs` and nowhere else, so that no loop and no file counts twice. A named file that
// is missing, unreadable, empty or no text is an error; so is any file or folder that cannot be
// read, and finding no text at all. Holds all texts in memory. Every message names a path.
absl::StatusOr<TextCollection> CollectTexts(const std::vector<std::string>& inputs,
                                            int64_t max_bytes);

}  // namespace upipe::data
