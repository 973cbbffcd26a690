// Shell completion: which words may come next on a command line. Pure, over a description of the
// verbs and options; shells call `upipe complete` through the short scripts here, so they never
// know less than this program does.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace upipe::client {

// What may stand in one place.
struct CompletionSource {
  enum class Kind { kNothing, kWords, kJobs, kWorkers, kFiles };
  Kind kind = Kind::kNothing;
  std::vector<std::string> words;  // kWords
};

struct CompletionOption {
  std::vector<std::string> names;  // "-o", "--output"
  std::string description;
  bool takes_value = false;
  CompletionSource value;
};

struct CompletionVerb {
  std::string name;
  std::string description;
  std::vector<CompletionOption> options;      // those of the verbs around it hold too
  std::vector<CompletionSource> positionals;  // in order
  std::vector<CompletionVerb> verbs;
};

// A word that may come next, and what to say of it.
struct Candidate {
  std::string word;
  std::string description;
};

// What begins with a prefix, asked only where it may stand.
struct CandidateLookups {
  using Lookup = std::function<std::vector<Candidate>(const std::string& prefix)>;
  Lookup jobs;     // ids
  Lookup workers;  // names
};

// What the last of `words` may become; `words` follow the program's name. None: file names belong
// there.
std::optional<std::vector<Candidate>> Complete(const CompletionVerb& program,
                                               const std::vector<std::string>& words,
                                               const CandidateLookups& lookups);

// What `upipe complete` prints: "word<TAB>description" a line, or ":files".
std::string RenderCandidates(const std::optional<std::vector<Candidate>>& candidates);

// The script for "bash", "zsh" or "fish"; empty for another shell.
absl::string_view CompletionScript(absl::string_view shell);

}  // namespace upipe::client
