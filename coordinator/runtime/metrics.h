// The coordinator's Prometheus endpoint: jobs by state, queue length, nodes by state, store
// revision.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/core/state.h"

namespace upipe::coordinator {

class Metrics {
 public:
  // Serves /metrics on `listen` ("127.0.0.1:0"). Unavailable when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<Metrics>> Serve(const std::string& listen);
  ~Metrics();

  // host:port in use.
  const std::string& address() const { return address_; }

  // Called by the deciding thread, at most once a second.
  void Update(const State& state, BootTime now);

 private:
  struct Families;
  Metrics();
  std::unique_ptr<Families> families_;
  std::string address_;
};

}  // namespace upipe::coordinator
