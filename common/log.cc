#include "common/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace upipe {
namespace {

std::atomic<LogLevel> min_level{LogLevel::kInfo};

std::string& Component() {
  static std::string* component = new std::string("upipe");  // outlives every logging thread
  return *component;
}

const char* NameOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "?";
}

void AppendEscaped(absl::string_view message, std::string& line) {
  for (const char c : message) {
    if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&line, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      line += c;
    }
  }
}

}  // namespace

void SetLogComponent(absl::string_view component) { Component() = std::string(component); }

void SetLogLevel(LogLevel level) { min_level.store(level, std::memory_order_relaxed); }

bool IsLogged(LogLevel level) { return level >= min_level.load(std::memory_order_relaxed); }

std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view component,
                          absl::string_view message) {
  std::string line =
      absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone()), " ",
                   NameOf(level), " ", component, ": ");
  AppendEscaped(message, line);
  line += '\n';
  return line;
}

LogLine::~LogLine() {
  const std::string line = FormatLogLine(absl::Now(), level_, Component(), message_.str());
  absl::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = write(STDERR_FILENO, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // standard error is gone or full: nothing left to tell anyone
    rest.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace upipe
