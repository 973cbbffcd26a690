// The listening server: address rules, keep-alive, health and reflection services.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/rpc/log_relay.h"
#include "coordinator/runtime/backup.h"
#include "coordinator/runtime/loop.h"

namespace upipe::coordinator {

class Server {
 public:
  struct Options {
    std::string listen = "127.0.0.1:0";
    bool insecure_listen = false;  // allows plaintext beyond loopback
    // Told of every call that ended, "/upipe.v1.JobService/Submit"; on any thread, must not block.
    std::function<void(const std::string& method, absl::StatusCode code, absl::Duration took)>
        on_call = {};
  };
  // FailedPrecondition for an address beyond loopback without insecure_listen; Unavailable when it
  // cannot be bound.
  static absl::StatusOr<std::unique_ptr<Server>> Listen(const Options& options, Loop& loop,
                                                        LogRelay& logs, BackupThread& backups);
  ~Server();

  // host:port in use.
  const std::string& address() const { return address_; }
  // Ends every call within `patience`. The loop must have ended before.
  void Shutdown(absl::Duration patience);

 private:
  struct Parts;
  explicit Server(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
  std::string address_;
};

}  // namespace upipe::coordinator
