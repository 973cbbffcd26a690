// Several hosts on one machine: a network namespace each, joined by bridges in a namespace of
// their own. They need no names and vanish with the process, however it ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace upipe::testing {

class NetworkLab {
 public:
  // Hosts 0 to num_hosts - 1, each on networks 0 to num_networks - 1 by interface net0, net1, ..
  // and with a loopback of its own. They know each other's hardware addresses, as hosts behind
  // routers: a host that is away is never "unreachable". Unavailable with the reason where this
  // machine cannot.
  static absl::StatusOr<std::unique_ptr<NetworkLab>> Create(int num_hosts, int num_networks = 1);
  ~NetworkLab();
  NetworkLab(const NetworkLab&) = delete;

  static std::string Address(int host, int network = 0);  // IPv4
  // Words before a command line that run it on the host, in the same process. /sys is the host's.
  std::vector<std::string> On(int host) const;

  // The host's packets on the network go nowhere from now on, and nobody is told: its interface
  // stays up.
  absl::Status Cut(int host, int network = 0) const;
  absl::Status Join(int host, int network = 0) const;

  // Bytes that have left the host by net<network>; 0 when that cannot be read.
  int64_t BytesSent(int host, int network = 0) const;

 private:
  NetworkLab() = default;
  absl::Status Build(int num_hosts, int num_networks);

  std::vector<int> hosts_;  // descriptors of the namespaces: they hold them
  int switch_ = -1;         // of the bridges'
};

}  // namespace upipe::testing
