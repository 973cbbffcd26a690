#include "engine/comm/ucx/tcp_watch.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace upipe::comm {
namespace {

constexpr int kLooksPerLimit = 8;
constexpr int kProbesPerLimit = 3;

// -1 when `fd` has no such option: it is no socket.
int OptionOf(int fd, int level, int name) {
  int value = 0;
  socklen_t length = sizeof value;
  return getsockopt(fd, level, name, &value, &length) == 0 ? value : -1;
}

// What `fd` watches; nothing when it is no epoll set.
std::vector<int> Targets(int fd) {
  std::ifstream info(absl::StrCat("/proc/self/fdinfo/", fd));
  std::vector<int> targets;
  for (std::string line; std::getline(info, line);) {
    std::istringstream words(line);
    std::string name;
    int target = -1;
    if (words >> name >> target && name == "tfd:") targets.push_back(target);
  }
  return targets;
}

// How long no packet has come; zero unless the connection is established.
absl::Duration SilenceOf(int socket) {
  tcp_info info = {};
  socklen_t length = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 ||
      info.tcpi_state != TCP_ESTABLISHED) {
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

// Has the kernel probe a connection that is idle, so that silence means that nobody is there. False
// when it did not so far: then what it has heard says nothing yet.
bool ProbedWhenIdle(int socket, absl::Duration interval) {
  const int on = 1;
  const int seconds = std::max(1, static_cast<int>(absl::ToInt64Seconds(interval)));
  const int probes = 2 * kProbesPerLimit;  // the kernel gives up after us
  if (OptionOf(socket, SOL_SOCKET, SO_KEEPALIVE) == on &&
      OptionOf(socket, IPPROTO_TCP, TCP_KEEPIDLE) == seconds) {
    return true;
  }
  setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  // Last: probes at once where that is due already.
  setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  return false;
}

// The TCP sockets that `epoll_fd` watches, directly or through epoll sets inside it.
std::vector<int> SocketsWatchedBy(int epoll_fd) {
  std::vector<int> sockets;
  for (const int target : Targets(epoll_fd)) {
    if (OptionOf(target, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP) {
      sockets.push_back(target);
    } else {
      const std::vector<int> inner = SocketsWatchedBy(target);
      sockets.insert(sockets.end(), inner.begin(), inner.end());
    }
  }
  return sockets;
}

}  // namespace

TcpWatch::TcpWatch(int epoll_fd, absl::Duration silence_limit)
    : epoll_fd_(epoll_fd), silence_limit_(std::max(silence_limit, kMinSilence)) {}

void TcpWatch::Probe() {
  for (const int socket : SocketsWatchedBy(epoll_fd_))
    ProbedWhenIdle(socket, silence_limit_ / kProbesPerLimit);
}

absl::Duration TcpWatch::CutSilent() {
  if (std::chrono::steady_clock::now() < next_look_) return absl::ZeroDuration();
  next_look_ = After(silence_limit_ / kLooksPerLimit);
  absl::Duration longest = absl::ZeroDuration();
  for (const int socket : SocketsWatchedBy(epoll_fd_)) {
    if (!ProbedWhenIdle(socket, silence_limit_ / kProbesPerLimit)) continue;
    const absl::Duration silence = SilenceOf(socket);
    if (silence <= silence_limit_) continue;
    shutdown(socket, SHUT_RDWR);
    longest = std::max(longest, silence);
  }
  return longest;
}

void TcpWatch::CutAll() {
  for (const int socket : SocketsWatchedBy(epoll_fd_)) shutdown(socket, SHUT_RDWR);
}

}  // namespace upipe::comm
