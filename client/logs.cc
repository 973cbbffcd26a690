// `upipe logs`: the bytes of one rank's log, from the start or its last lines, then as they come.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"
#include "client/follow.h"

namespace upipe::client {
namespace {

// Read backwards for --tail: lines longer than this on average are cut off at the front.
constexpr int64_t kTailBytesPerLine = 512;
constexpr int64_t kMaxTailBytes = 8 << 20;

// The last `lines` lines of `text`.
absl::string_view LastLines(absl::string_view text, int64_t lines) {
  if (lines <= 0) return absl::string_view();
  size_t from = text.size();
  if (from > 0 && text[from - 1] == '\n') --from;  // the newline that ends the last line
  while (from > 0) {
    if (text[from - 1] == '\n' && --lines == 0) break;
    --from;
  }
  return text.substr(from);
}

// Reads one rank's log, remembering how far it got, so that a lost connection costs nothing.
class LogReader {
 public:
  LogReader(Console& console, v1::LogsRequest request)
      : console_(console), request_(std::move(request)) {}

  // Prints all there is from the offset on; with follow, until the rank is gone.
  absl::Status Print(bool follow) {
    request_.set_follow(follow);
    return ReadPersistently([&](const std::string& data) { console_.out << data << std::flush; });
  }

  // Prints the last `lines` lines there are now.
  absl::Status PrintTail(int64_t lines) {
    request_.set_follow(false);
    request_.set_offset(-std::clamp(lines * kTailBytesPerLine, int64_t{1}, kMaxTailBytes));
    std::string text;
    const absl::Status read = ReadPersistently([&](const std::string& data) { text += data; });
    if (request_.offset() < 0) request_.set_offset(0);  // nothing there yet
    console_.out << LastLines(text, lines) << std::flush;
    return read;
  }

 private:
  template <typename OnData>
  absl::Status ReadPersistently(OnData on_data) {
    std::optional<Outage> outage(std::in_place, console_, kFirstContactLimit);
    while (true) {
      bool heard = false;
      const absl::Status status =
          console_.coordinator.Logs(request_, [&](const v1::LogsResponse& message) {
            heard = true;
            if (!message.gap().empty()) console_.err << "[" << message.gap() << "]\n";
            on_data(message.data());
            if (!message.data()
                     .empty()) {  // an empty one only says that the rank's worker is there
              request_.set_offset(message.offset() + static_cast<int64_t>(message.data().size()));
            }
            return true;
          });
      if (!IsOutage(status)) return status;
      if (heard) outage.emplace(console_, kOutageLimit);
      if (!outage->PauseBeforeRetry(status)) return status;
    }
  }

  Console& console_;
  v1::LogsRequest request_;
};

}  // namespace

int Logs(Console& console, const LogsOptions& options) {
  const auto fail = [&](const absl::Status& status) {
    console.err << "upipe: " << status.message() << "\n";
    const bool wrong = absl::IsInvalidArgument(status) || absl::IsNotFound(status);
    return wrong ? kExitWrongRequest : kExitFailed;
  };
  const absl::StatusOr<std::string> id = ResolveJob(console, options.job);
  if (!id.ok()) return fail(id.status());
  v1::LogsRequest request;
  request.set_id(*id);
  request.set_rank(options.rank);
  LogReader reader(console, request);
  absl::Status status;
  if (options.tail.has_value()) status = reader.PrintTail(*options.tail);
  if (status.ok() && (options.follow || !options.tail.has_value()))
    status = reader.Print(options.follow);
  return status.ok() ? kExitDone : fail(status);
}

}  // namespace upipe::client
