// Structured log lines on standard error: time, level, component, message, one line each.
// Thread-safe; a line is one write(2), so lines of several processes sharing a file do not mix.
//   UPIPE_LOG(INFO) << "job " << id << " is running";
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace upipe {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

// Who speaks, e.g. "coordinator"; default "upipe". Call once in main, before other threads log.
void SetLogComponent(absl::string_view component);

// Lines below `level` are dropped, their arguments not evaluated. Default kInfo. Thread-safe.
void SetLogLevel(LogLevel level);
bool IsLogged(LogLevel level);

// "2026-01-31T08:15:30.125Z WARNING coordinator: message\n". Control characters of `message` are
// escaped, so the result is always exactly one line.
std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view component,
                          absl::string_view message);

// Collects one line and writes it in its destructor.
class LogLine {
 public:
  explicit LogLine(LogLevel level) : level_(level) {}
  LogLine(const LogLine&) = delete;
  LogLine& operator=(const LogLine&) = delete;
  ~LogLine();
  std::ostream& stream() { return message_; }

 private:
  LogLevel level_;
  std::ostringstream message_;
};

}  // namespace upipe

#define UPIPE_LOG_LEVEL_DEBUG ::upipe::LogLevel::kDebug
#define UPIPE_LOG_LEVEL_INFO ::upipe::LogLevel::kInfo
#define UPIPE_LOG_LEVEL_WARNING ::upipe::LogLevel::kWarning
#define UPIPE_LOG_LEVEL_ERROR ::upipe::LogLevel::kError
#define UPIPE_LOG(level)                             \
  if (!::upipe::IsLogged(UPIPE_LOG_LEVEL_##level)) { \
  } else                                             \
    ::upipe::LogLine(UPIPE_LOG_LEVEL_##level).stream()
