// The worker daemon: one thread that feeds the agent core and carries out what it decides;
// everything that touches sockets, processes or disks runs on threads of its own behind queues.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/inventory/device_inventory.h"

namespace upipe::worker {

struct WorkerOptions {
  std::string coordinator;            // host:port
  std::string name;                   // unique, [a-zA-Z0-9._-]{1,63}
  std::string node;                   // ranks with equal nodes share memory
  int num_slots = 1;                  // 1 to 1,024 trainer processes at a time
  int64_t memory_per_rank_bytes = 0;  // > 0
  std::string state_dir;              // journal, logs, step records; one worker each
  std::string runtime_dir;            // for the trainer socket when state_dir is too long for one
  std::string trainer_binary;
  absl::Duration leave_grace = absl::Minutes(10);  // from RequestLeave to the kill of what is left
  int64_t log_bytes = int64_t{4} << 30;     // of ended ranks; one that runs has up to 144 MiB more
  std::string transport_interface = "all";  // network interfaces between nodes, comma-separated
  std::string metrics_listen = "127.0.0.1:0";
  std::string health_listen;     // host:port of grpc.health.v1 for probes; empty: none
  bool insecure_listen = false;  // allows metrics and health on other than loopback
  bool allow_cgroup = true;
  bool place_ranks = true;      // on CPUs of their own, where there are enough
  std::string backend = "cpu";  // or cuda: a device for each slot
  // Of the devices, the first num_slots of which are offered; null: none is known to the worker.
  std::shared_ptr<DeviceInventory> inventory;
  std::string isa;
  std::string version;
  std::vector<std::string> environment;  // of the trainers, without UPIPE_*
};

class WorkerDaemon {
 public:
  // Kills what an earlier worker left, then listens. Nothing is dialled yet. All violations of the
  // options at once.
  static absl::StatusOr<std::unique_ptr<WorkerDaemon>> Create(const WorkerOptions& options);
  virtual ~WorkerDaemon() = default;

  // Works until every rank is proven gone after RequestLeave or RequestShutdown. DeadlineExceeded
  // when one was not within the kill bound of its kill.
  virtual absl::Status Run() = 0;
  // Thread-safe. Takes no new ranks, and ends when its own have left at a step boundary, on the
  // coordinator's order or, when that is silent, on its own; kills what is left after leave_grace.
  virtual void RequestLeave() = 0;
  // Thread-safe. Kills every rank now.
  virtual void RequestShutdown() = 0;

  // One "name = value" a line: options and what was found on this machine.
  virtual std::string Configuration() const = 0;
};

}  // namespace upipe::worker
