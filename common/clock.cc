#include "common/clock.h"

#include <ctime>

#include "absl/time/clock.h"
#include "common/check.h"

namespace upipe {
namespace {

class MachineClock : public Clock {
 public:
  BootTime Now() const override {
    timespec now;
    UPIPE_CHECK(clock_gettime(CLOCK_BOOTTIME, &now) == 0);
    return {absl::DurationFromTimespec(now)};
  }
  int64_t UnixMillis() const override { return absl::ToUnixMillis(absl::Now()); }
};

}  // namespace

Clock& SystemClock() {
  static MachineClock* clock =
      new MachineClock;  // never destroyed: detached threads may still read it
  return *clock;
}

}  // namespace upipe
