// A port of its own for grpc.health.v1, so that whoever watches a daemon needs no access to what it
// serves: "" is the process, other names are what it is ready for.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace upipe {

class HealthServer {
 public:
  // Serves on `listen` (host:port, port 0 = any free one). The process counts as alive from now on,
  // nothing else as ready. FailedPrecondition beyond loopback without `insecure_listen`.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Listen(const std::string& listen,
                                                              bool insecure_listen);
  ~HealthServer();

  // host:port in use.
  const std::string& address() const { return address_; }
  // Whether `service` is ready. Thread-safe.
  void SetServing(const std::string& service, bool serving);

 private:
  struct Parts;
  explicit HealthServer(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
  std::string address_;
};

}  // namespace upipe
