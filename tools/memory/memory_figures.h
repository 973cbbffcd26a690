// The figures of docs/memory.md: tables of the released code beside this engine, and the plot of
// bytes by context. Pure but for processor time: the same text on every machine.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace upipe::memory {

struct Figures {
  std::map<std::string, std::string> tables;  // by the name in "<!-- table NAME -->"
  std::string picture;                        // docs/pictures/memory-by-context.svg
};

// Takes a few seconds: some dry runs of the engine's step.
absl::StatusOr<Figures> MakeFigures();

// `text` with each table between its "<!-- table NAME -->" and "<!-- end -->". NotFound names a
// table the text wants and nobody makes, or one that is made and not wanted.
absl::StatusOr<std::string> Filled(const std::string& text,
                                   const std::map<std::string, std::string>& tables);

}  // namespace upipe::memory
