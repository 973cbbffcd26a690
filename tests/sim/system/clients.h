// People and programs at the coordinator's door: they submit until they are answered, cancel, hold
// and release, and operate the workers.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "upipe/v1/job.pb.h"

namespace upipe::sim {

class Cluster;
class World;

class Clients {
 public:
  explicit Clients(Cluster& cluster);

  void Begin();
  // For an answer to a submit, or for a hold to be taken back.
  bool waiting() const;

 private:
  void SubmitNow();
  void Submit(const std::string& request_id, const v1::JobSpec& spec, bool hold);
  void ActOnJob();
  void ActOnWorker();
  void CleanUp();
  std::optional<std::string> AnyJob(bool unended);
  v1::JobSpec NewSpec();

  Cluster& cluster_;
  World& world_;
  int requests_ = 0;
  int ids_ = 0;
  std::set<std::string> unanswered_;
};

}  // namespace upipe::sim
