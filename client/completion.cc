#include "client/completion.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/render.h"

namespace upipe::client {
namespace {

using Candidates = std::vector<Candidate>;

// Reads the words before the one to complete: which verb they lead to, and what they wait for.
class WordReader {
 public:
  explicit WordReader(const CompletionVerb& program) : verbs_{&program} {}

  void Read(const std::string& word) {
    if (pending_ != nullptr) {
      if (word != "=") pending_ = nullptr;  // bash cuts "--state=x" into three words
    } else if (!only_positionals_ && word == "--") {
      only_positionals_ = true;
    } else if (!only_positionals_ && word.size() > 1 && word[0] == '-') {
      ReadOption(word);
    } else if (const CompletionVerb* verb = FindVerb(word)) {
      verbs_.push_back(verb);
    } else {
      ++positionals_;
    }
  }

  std::optional<Candidates> Complete(const std::string& word,
                                     const CandidateLookups& lookups) const {
    if (pending_ != nullptr) return FromSource(pending_->value, word, "", lookups);
    const size_t equals = word.find('=');
    if (absl::StartsWith(word, "--") && equals != std::string::npos) {
      const CompletionOption* option = FindOption(word.substr(0, equals));
      if (option == nullptr) return Candidates();
      return FromSource(option->value, word.substr(equals + 1), word.substr(0, equals + 1),
                        lookups);
    }
    if (!only_positionals_ && absl::StartsWith(word, "-")) return Options(word);
    const CompletionVerb& verb = *verbs_.back();
    if (!verb.verbs.empty()) return Verbs(verb, word);
    if (positionals_ >= verb.positionals.size()) return Candidates();
    return FromSource(verb.positionals[positionals_], word, "", lookups);
  }

 private:
  void ReadOption(const std::string& word) {
    const CompletionOption* option = FindOption(word);
    if (option != nullptr && option->takes_value) pending_ = option;
  }

  const CompletionVerb* FindVerb(const std::string& word) const {
    for (const CompletionVerb& verb : verbs_.back()->verbs) {
      if (verb.name == word) return &verb;
    }
    return nullptr;
  }

  const CompletionOption* FindOption(const std::string& name) const {
    for (const CompletionVerb* verb : verbs_) {
      for (const CompletionOption& option : verb->options) {
        if (std::find(option.names.begin(), option.names.end(), name) != option.names.end())
          return &option;
      }
    }
    return nullptr;
  }

  // By long name, the verb's own first; by short name only what has no other.
  Candidates Options(const std::string& word) const {
    Candidates found;
    for (auto verb = verbs_.rbegin(); verb != verbs_.rend(); ++verb) {
      for (const CompletionOption& option : (*verb)->options) {
        const std::string& name = option.names.back();
        if (absl::StartsWith(name, word)) found.push_back({name, option.description});
      }
    }
    return found;
  }

  static Candidates Verbs(const CompletionVerb& around, const std::string& word) {
    Candidates found;
    for (const CompletionVerb& verb : around.verbs) {
      if (absl::StartsWith(verb.name, word)) found.push_back({verb.name, verb.description});
    }
    return found;
  }

  static std::optional<Candidates> FromSource(const CompletionSource& source,
                                              const std::string& word, const std::string& before,
                                              const CandidateLookups& lookups) {
    Candidates found;
    switch (source.kind) {
      case CompletionSource::Kind::kFiles:
        return std::nullopt;
      case CompletionSource::Kind::kJobs:
        return lookups.jobs(word);
      case CompletionSource::Kind::kWorkers:
        return lookups.workers(word);
      case CompletionSource::Kind::kWords:
        for (const std::string& value : source.words) {
          if (absl::StartsWith(value, word)) found.push_back({before + value, ""});
        }
        return found;
      case CompletionSource::Kind::kNothing:
        return found;
    }
    return found;
  }

  std::vector<const CompletionVerb*> verbs_;   // from the program inwards
  const CompletionOption* pending_ = nullptr;  // waits for its value
  size_t positionals_ = 0;
  bool only_positionals_ = false;
};

constexpr absl::string_view kBash =
    R"(# Completion of upipe in bash. For this shell: source <(upipe completion bash)
# For every shell: upipe completion bash > ~/.local/share/bash-completion/completions/upipe
_upipe() {
  local line
  COMPREPLY=()
  while IFS= read -r line; do
    if [[ $line == :files ]]; then
      compopt -o default
      return
    fi
    COMPREPLY+=("${line%%$'\t'*}")
  done < <("${COMP_WORDS[0]}" complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _upipe upipe
)";

constexpr absl::string_view kZsh = R"(#compdef upipe
# Completion of upipe in zsh. For this shell: source <(upipe completion zsh)
# For every shell: upipe completion zsh > a folder of $fpath, as _upipe
_upipe() {
  local line
  local -a lines candidates
  lines=("${(@f)$("${words[1]}" complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ ${lines[1]} == :files ]]; then
    _files
    return
  fi
  for line in "${lines[@]}"; do
    [[ -n $line ]] && candidates+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
  done
  _describe upipe candidates
}
if [[ ${funcstack[1]} == _upipe ]]; then
  _upipe "$@"
else
  compdef _upipe upipe
fi
)";

constexpr absl::string_view kFish =
    R"(# Completion of upipe in fish. For this shell: upipe completion fish | source
# For every shell: upipe completion fish > ~/.config/fish/completions/upipe.fish
function __upipe_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l lines ($words[1] complete -- $words[2..-1] "$current" 2>/dev/null)
    if test "$lines[1]" = ":files"
        __fish_complete_path "$current"
    else
        printf '%s\n' $lines
    end
end
complete -c upipe -f -a '(__upipe_complete)'
)";

}  // namespace

std::optional<std::vector<Candidate>> Complete(const CompletionVerb& program,
                                               const std::vector<std::string>& words,
                                               const CandidateLookups& lookups) {
  WordReader reader(program);
  for (size_t i = 0; i + 1 < words.size(); ++i) reader.Read(words[i]);
  return reader.Complete(words.empty() ? "" : words.back(), lookups);
}

std::string RenderCandidates(const std::optional<std::vector<Candidate>>& candidates) {
  if (!candidates) return ":files\n";
  std::string text;
  for (const Candidate& candidate : *candidates) {
    absl::StrAppend(&text, Printable(candidate.word), "\t", Printable(candidate.description), "\n");
  }
  return text;
}

absl::string_view CompletionScript(absl::string_view shell) {
  if (shell == "bash") return kBash;
  if (shell == "zsh") return kZsh;
  return shell == "fish" ? kFish : absl::string_view();
}

}  // namespace upipe::client
