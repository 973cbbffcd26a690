#include "tests/sim/system/faults.h"

#include <algorithm>
#include <csignal>
#include <iterator>
#include <vector>

#include "tests/sim/system/cluster.h"

namespace upipe::sim {
namespace {

constexpr absl::Duration kForLong = absl::Minutes(10);

}  // namespace

Faults::Faults(Cluster& cluster) : cluster_(cluster), world_(cluster.world()) {}

void Faults::Begin() {
  world_.After(world_.Millis(500, 2000), [this] { Next(); });
  if (!world_.Chance(25)) return;
  // One restore from a backup, when all workers have come to be known.
  world_.After(world_.Millis(4000, 15000), [this] {
    if (!world_.faults() || !cluster_.up() || !cluster_.AllDurable()) return;
    if (cluster_.state().nodes.size() < cluster_.workers().size()) return;
    cluster_.TakeBackup();
  });
  world_.After(world_.Millis(16000, 30000), [this] {
    if (!world_.faults() || !cluster_.up() || !cluster_.has_backup()) return;
    world_.CountFault("store restored from a backup");
    cluster_.RestoreBackup();
  });
}

void Faults::Next() {
  if (!world_.faults()) return;
  world_.After(world_.Millis(30, 1400), [this] { Next(); });
  auto& worker = *cluster_.workers()[world_.Random(cluster_.workers().size())];
  const uint64_t what = world_.Random(100);
  if (what < 10) return OnCoordinator();
  if (what < 30) return OnNetwork();
  if (what < 45) return OnWorker(worker);
  if (what < 52) return OnCheckpoints();
  std::vector<Trainer*> running;
  for (const auto& each : cluster_.workers()) {
    for (Trainer* trainer : each->Running()) running.push_back(trainer);
  }
  if (running.empty()) return OnNetwork();
  OnTrainer(*running[world_.Random(running.size())]);
}

// Never cut short: what waits has been put off until then, and comes in order.
void Faults::StandStill(Time& until, absl::Duration how_long) {
  until = std::max(until, world_.now() + how_long);
}

void Faults::OnCoordinator() {
  switch (world_.Random(5)) {
    case 0:
    case 1:
      world_.CountFault("coordinator crashes");
      return cluster_.CrashCoordinator(world_.Millis(50, 5000));
    case 2:
      world_.CountFault("coordinator's disk is slow");
      return cluster_.SlowDisk(world_.Millis(100, 5000));
    case 3:
      world_.CountFault("coordinator's machine is suspended");
      StandStill(cluster_.coordinator_machine().suspended_until,
                 world_.Millis(100, world_.Chance(20) ? 8000 : 2500));
      return;
    default:
      world_.CountFault("messages are lost");
      return cluster_.LoseSome(world_.Millis(200, 3000));
  }
}

void Faults::OnNetwork() {
  const size_t w = world_.Random(cluster_.workers().size());
  const absl::Duration how_long = world_.Millis(100, world_.Chance(40) ? 9000 : 1500);
  switch (world_.Random(6)) {
    case 0:
      world_.CountFault("network: nothing from a worker");
      return cluster_.Block(w, true, false, how_long);
    case 1:
      world_.CountFault("network: nothing to a worker");
      return cluster_.Block(w, false, true, how_long);
    case 2:
    case 3:
      world_.CountFault("network: a worker is cut off");
      cluster_.Block(w, true, true, how_long);
      if (world_.Chance(50)) cluster_.Cut(w);
      return;
    default:
      world_.CountFault("network: a stream breaks");
      return cluster_.Cut(w);
  }
}

void Faults::OnWorker(WorkerMachine& worker) {
  WorkerMachine* w = &worker;
  switch (world_.Random(7)) {
    case 0:
    case 1:
      world_.CountFault("worker crashes");
      cluster_.Cut(w->index());
      w->CrashDaemon();
      return world_.After(world_.Millis(50, 4000), [w] {
        if (w->powered()) w->Boot();
      });
    case 2:
      if (!w->powered()) return;
      world_.CountFault("worker's machine loses power");
      cluster_.Cut(w->index());
      w->PowerOff();
      return world_.After(world_.Millis(500, 9000), [w] { w->Boot(); });
    case 3:
      world_.CountFault("worker's machine is suspended");
      StandStill(w->machine().suspended_until, world_.Millis(100, world_.Chance(40) ? 9000 : 2000));
      return;
    case 4:
    case 5:
      world_.CountFault("worker is stopped");
      StandStill(w->daemon().stopped_until, world_.Millis(100, world_.Chance(40) ? 9000 : 2000));
      return;
    default:
      if (!w->up()) return;
      world_.CountFault("worker is told to leave");
      if (world_.Chance(50)) {  // and nobody hears of it
        cluster_.Block(w->index(), true, true, world_.Millis(3000, 9000));
      }
      return world_.After(w->daemon(), absl::ZeroDuration(), [w] { w->Leave(); });
  }
}

void Faults::OnTrainer(Trainer& trainer) {
  switch (world_.Random(12)) {
    case 0:
    case 1:
      world_.CountFault("trainer is stopped");
      return trainer.Stop(world_.Chance(40) ? kForLong : world_.Millis(100, 4000));
    case 2:
      world_.CountFault("trainer is killed for memory");
      return trainer.Die(SIGKILL, "memory.events oom_kill +1");
    case 3:
      world_.CountFault("trainer segfaults");
      return trainer.Die(SIGSEGV);
    case 4:
      world_.CountFault("trainer exits with a code");
      return trainer.Exit(2);
    case 5:
      world_.CountFault("trainer exits with code 0 before its time");
      return trainer.Exit(0);
    case 6:
      world_.CountFault("communicator stands still");
      trainer.gang().stuck = true;
      return;
    case 7:
    case 8:
      world_.CountFault("trainer hangs in the kernel");
      trainer.Linger(world_.Millis(100, 6000));
      return trainer.Kill();
    case 9:
      world_.CountFault("trainer leaves strays");
      trainer.LeaveStrays(world_.Millis(100, 4000));
      if (world_.Chance(50)) trainer.Exit(1);
      return;
    case 10:
      world_.CountFault("rank 0 proposes again");
      for (Trainer* member : trainer.gang().members) {
        if (member != nullptr && member->running()) member->ProposeAgain();
      }
      return;
    default:
      world_.CountFault("trainer is killed");
      return trainer.Die(SIGKILL);
  }
}

void Faults::OnCheckpoints() {
  CheckpointRoot& root = cluster_.root();
  if (root.empty()) return;
  auto at = root.begin();
  std::advance(at, world_.Random(root.size()));
  JobFolder& folder = at->second;
  if (world_.Chance(15)) {
    world_.CountFault("a manifest of a generation that is still to come");
    folder.manifests[{int64_t{1} << 40, 1}] = false;
    return;
  }
  world_.CountFault("newest checkpoint is damaged");
  folder.Damage();
}

}  // namespace upipe::sim
