// One UCX context with its one worker: the messages of one kind of wire (shared memory or tcp).
// Everything here belongs to one thread.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace upipe::comm {

class UcxLane {
 public:
  struct Options {
    std::string transports;            // UCX_TLS
    std::string devices;               // UCX_NET_DEVICES
    bool reports_peer_errors = false;  // tcp only: shared memory cannot (docs/traps.md)
  };
  static absl::StatusOr<std::unique_ptr<UcxLane>> Create(const Options& options);
  // Drops what is in flight without touching it, endpoints included.
  ~UcxLane();
  UcxLane(const UcxLane&) = delete;

  const std::string& address() const { return address_; }
  ucp_worker_h worker() const { return worker_; }
  // Readable when an armed worker has something to do.
  int event_fd() const { return event_fd_; }

  // `on_error(argument, endpoint, status)` is called from Progress when the lane reports peer
  // errors.
  absl::StatusOr<ucp_ep_h> Connect(const std::string& address, ucp_err_handler_cb_t on_error,
                                   void* argument);
  bool Progress() { return ucp_worker_progress(worker_) != 0; }
  // True when the event fd will tell of news; false when there is something to do already.
  bool Arm() { return ucp_worker_arm(worker_) == UCS_OK; }

 private:
  explicit UcxLane(const Options& options) : options_(options) {}
  absl::Status Open();

  const Options options_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::string address_;
};

// UNAVAILABLE: "<what>: <UCX's text>".
absl::Status UcxError(const std::string& what, ucs_status_t status);

}  // namespace upipe::comm
