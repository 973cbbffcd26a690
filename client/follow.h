// Staying with a job or a coordinator across lost connections: retry with backoff, resume, give up
// after a bound.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/commands.h"

namespace upipe::client {

// How long one outage may last: before the first answer, and later.
inline constexpr absl::Duration kFirstContactLimit = absl::Seconds(20);
inline constexpr absl::Duration kOutageLimit = absl::Minutes(10);

// True for errors that mean "the coordinator is away": the same call may succeed later.
bool IsOutage(const absl::Status& status);

// One outage: says so on `err` unless the first retry helps, pauses longer each time (0.2 s to 5
// s), ends after `limit`.
class Outage {
 public:
  Outage(Console& console, absl::Duration limit) : console_(console), limit_(limit) {}
  // Pauses before another attempt. False when the outage has lasted `limit`.
  bool PauseBeforeRetry(const absl::Status& status);

 private:
  Console& console_;
  const absl::Duration limit_;
  absl::Duration pause_ = absl::Milliseconds(200);
  BootTime began_;
  int retries_ = 0;
};

// The id of the one job whose id is `text` or begins with it. NotFound or InvalidArgument names
// what was found.
absl::StatusOr<std::string> ResolveJob(Console& console, const std::string& text);

// Watches job `id` until `on_message` returns false or the job is terminal, reconnecting in
// between; `limit` bounds the whole (DeadlineExceeded). Returns OK in both former cases.
absl::Status FollowJob(Console& console, const std::string& id, absl::Duration limit,
                       const CoordinatorClient::OnWatch& on_message);

}  // namespace upipe::client
