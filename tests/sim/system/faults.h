// What goes wrong, and when.
#pragma once

#include "tests/sim/system/world.h"

namespace upipe::sim {

class Cluster;
class Trainer;
class WorkerMachine;

class Faults {
 public:
  explicit Faults(Cluster& cluster);
  void Begin();

 private:
  void Next();
  void StandStill(Time& until, absl::Duration how_long);
  void OnCoordinator();
  void OnNetwork();
  void OnWorker(WorkerMachine& worker);
  void OnTrainer(Trainer& trainer);
  void OnCheckpoints();

  Cluster& cluster_;
  World& world_;
};

}  // namespace upipe::sim
