#include "client/http_get.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/clock.h"
#include "common/status.h"

namespace upipe::client {
namespace {

// A connected socket whose every step ends at one deadline.
class Connection {
 public:
  Connection(std::string address, BootTime deadline)
      : address_(std::move(address)), deadline_(deadline) {}
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Open() {
    const size_t colon = address_.rfind(':');
    if (colon == std::string::npos) return Failed("is no host:port");
    std::string host = address_.substr(0, colon);
    if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
      host = host.substr(1, host.size() - 2);
    }
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = getaddrinfo(host.c_str(), address_.c_str() + colon + 1, &hints, &found);
    if (error != 0) return Failed(gai_strerror(error));
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
    fd_ = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd_ < 0) return Failed(strerror(errno));
    if (connect(fd_, found->ai_addr, found->ai_addrlen) == 0) return absl::OkStatus();
    if (errno != EINPROGRESS) return Failed(strerror(errno));
    UPIPE_RETURN_IF_ERROR(Await(POLLOUT));
    int failed = 0;
    socklen_t size = sizeof(failed);
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &failed, &size);
    return failed == 0 ? absl::OkStatus() : Failed(strerror(failed));
  }

  absl::Status Send(absl::string_view text) {
    while (!text.empty()) {
      UPIPE_RETURN_IF_ERROR(Await(POLLOUT));
      const ssize_t sent = send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
      if (sent < 0) return Failed(strerror(errno));
      text.remove_prefix(static_cast<size_t>(sent));
    }
    return absl::OkStatus();
  }

  // Until the peer closes, or `bytes_max` are there.
  absl::StatusOr<std::string> Receive(size_t bytes_max) {
    std::string text;
    std::array<char, 16 << 10> chunk;
    while (text.size() < bytes_max) {
      UPIPE_RETURN_IF_ERROR(Await(POLLIN));
      const ssize_t got =
          recv(fd_, chunk.data(), std::min(chunk.size(), bytes_max - text.size()), 0);
      if (got < 0) return Failed(strerror(errno));
      if (got == 0) break;
      text.append(chunk.data(), static_cast<size_t>(got));
    }
    return text;
  }

 private:
  absl::Status Failed(absl::string_view why) const {
    return absl::UnavailableError(absl::StrCat("cannot read from ", address_, ": ", why));
  }
  absl::Status Await(short events) const {
    while (true) {
      const absl::Duration left = deadline_ - SystemClock().Now();
      if (left <= absl::ZeroDuration()) {
        return absl::DeadlineExceededError(absl::StrCat(address_, " did not answer in time"));
      }
      pollfd poll_fd = {.fd = fd_, .events = events, .revents = 0};
      const int ready = poll(&poll_fd, 1, static_cast<int>(absl::ToInt64Milliseconds(left) + 1));
      if (ready > 0) return absl::OkStatus();
      if (ready < 0 && errno != EINTR) return Failed(strerror(errno));
    }
  }

  const std::string address_;
  const BootTime deadline_;
  int fd_ = -1;
};

}  // namespace

absl::StatusOr<std::string> HttpGet(const std::string& address, const std::string& path,
                                    const HttpLimits& limits) {
  Connection connection(address, SystemClock().Now() + limits.time);
  UPIPE_RETURN_IF_ERROR(connection.Open());
  // HTTP/1.0: the answer comes in one piece and ends with the connection.
  UPIPE_RETURN_IF_ERROR(
      connection.Send(absl::StrCat("GET ", path, " HTTP/1.0\r\nHost: ", address, "\r\n\r\n")));
  UPIPE_ASSIGN_OR_RETURN(const std::string answer, connection.Receive(limits.bytes));
  const size_t head = answer.find("\r\n\r\n");
  const std::string status = answer.substr(0, std::min(answer.find("\r\n"), answer.size()));
  if (head == std::string::npos || !absl::StrContains(status, " 200")) {
    return absl::UnknownError(absl::StrCat(address, " answered '", status.substr(0, 100), "'"));
  }
  return answer.substr(head + 4);
}

}  // namespace upipe::client
