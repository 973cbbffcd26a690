// Time as the control plane uses it: a monotonic clock that counts suspended time (CLOCK_BOOTTIME)
// for every decision, the wall clock for display only. Pure cores never hold a Clock: `now` is an
// argument.
#pragma once

#include <compare>
#include <cstdint>

#include "absl/time/time.h"

namespace upipe {

// A point on one machine's boot-time clock. Never sent to another machine.
struct BootTime {
  absl::Duration since_boot;
  friend bool operator==(const BootTime& a, const BootTime& b) = default;
  friend std::strong_ordering operator<=>(const BootTime& a, const BootTime& b) = default;
  BootTime operator+(absl::Duration d) const { return {since_boot + d}; }
  absl::Duration operator-(BootTime other) const { return since_boot - other.since_boot; }
};

class Clock {
 public:
  virtual ~Clock() = default;
  virtual BootTime Now() const = 0;
  virtual int64_t UnixMillis() const = 0;
};

// The machine's clocks. Thread-safe.
Clock& SystemClock();

}  // namespace upipe
