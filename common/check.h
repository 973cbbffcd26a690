// Invariants, on in release. A failed check prints file, line, condition and message, then aborts.
// Abseil 20220623 has no CHECK, so this is ours.
#pragma once

#include <sstream>

namespace upipe {

// Collects the message of a failed check and aborts the process in its destructor.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return message_; }

 private:
  std::ostringstream message_;
};

}  // namespace upipe

#define UPIPE_CHECK(condition) \
  if (condition) {             \
  } else                       \
    ::upipe::CheckFailure(__FILE__, __LINE__, #condition).stream()

#define UPIPE_CHECK_OK(expr)                                                \
  if (const auto& upipe_check_status_ = (expr); upipe_check_status_.ok()) { \
  } else                                                                    \
    ::upipe::CheckFailure(__FILE__, __LINE__, #expr).stream() << upipe_check_status_
