// The trainer's end of its stream to the worker. Never blocks the compute thread; when the worker
// is lost the handler ends the process.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "upipe/v1/trainer_service.pb.h"

namespace upipe::worker {

class TrainerLink {
 public:
  struct Handlers {
    std::function<void(const v1::WorkerCommand&)> command;  // gRPC's thread; must not block
    std::function<void()> lost;                             // the stream ended before Finish
  };
  // Dials and says hello.
  static std::unique_ptr<TrainerLink> Dial(const std::string& socket_path,
                                           const v1::TrainerHello& hello, Handlers handlers);
  virtual ~TrainerLink() = default;

  // Thread-safe. When 1,024 messages wait, a new step report replaces the newest waiting one.
  virtual void Send(v1::TrainerMessage message) = 0;
  // Sends the last message and waits until the worker has taken everything, at most `patience`.
  virtual void Finish(const v1::TrainerFinished& finished, absl::Duration patience) = 0;
};

}  // namespace upipe::worker
