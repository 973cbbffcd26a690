// Simulated time and chance: one queue of things to come, machines with clocks of their own, and
// processes that are stopped and end. Everything is drawn from one seed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/clock.h"

namespace upipe::sim {

using Time = absl::Duration;  // since the simulation began

// A machine: its boot-time clock, and whether it is suspended or cut off from its peers' machines.
struct Machine {
  absl::Duration clock_base;
  double clock_rate = 1;
  Time suspended_until;
  Time isolated_until;

  BootTime Clock(Time now) const { return {clock_base + clock_rate * now}; }
  // From `now` until its clock shows `local`.
  absl::Duration Until(BootTime local, Time now) const {
    return (local - Clock(now)) / clock_rate + absl::Microseconds(1);
  }
};

// A process. What it has scheduled waits while it or its machine stands still, and is dropped when
// it ends.
struct Actor {
  Machine* machine = nullptr;
  Time stopped_until;
  uint64_t life = 1;

  void End() { ++life; }
};

class World {
 public:
  using Action = std::function<void()>;

  World(uint64_t seed, bool verbose);

  Time now() const { return now_; }
  // 0 to n - 1.
  uint64_t Random(uint64_t n) { return Next() % n; }
  bool Chance(double percent) { return Random(10'000) < percent * 100; }
  absl::Duration Between(absl::Duration low, absl::Duration high);
  absl::Duration Millis(int64_t low, int64_t high) {
    return Between(absl::Milliseconds(low), absl::Milliseconds(high));
  }

  // Of the network, the kernel, people: nothing stops it.
  void After(absl::Duration delay, Action action);
  void After(Actor& actor, absl::Duration delay, Action action);
  // The next thing happens. Actors live as long as the world.
  void RunOne();

  // While faults are on, chance works against the cluster.
  bool faults() const { return faults_; }
  void StopFaults() { faults_ = false; }
  // A chance that only exists while faults are on; counted when it comes true.
  bool Mishap(double percent);
  void CountFault(const char* what);
  int64_t num_faults() const { return num_faults_; }

  size_t pending() const { return heap_.size(); }
  void CountStep() { ++num_steps_; }
  int64_t num_steps() const { return num_steps_; }

  void Violate(const std::string& what);
  const std::vector<std::string>& violations() const { return violations_; }

  bool verbose() const { return verbose_; }
  void Trace(const std::string& who, const std::string& what) const;
  // Equal for two runs that did the same.
  uint64_t digest() const { return digest_; }

 private:
  struct Item {
    Time due;
    uint64_t number = 0;
    Actor* actor = nullptr;
    uint64_t life = 0;
    Action action;
  };
  struct Later {
    bool operator()(const Item& a, const Item& b) const {
      return a.due != b.due ? a.due > b.due : a.number > b.number;
    }
  };
  uint64_t Next();
  void Push(Item item);

  uint64_t random_[2];
  const bool verbose_;
  bool faults_ = true;
  Time now_;
  uint64_t next_number_ = 0;
  std::vector<Item> heap_;
  int64_t num_faults_ = 0;
  int64_t num_steps_ = 0;
  uint64_t digest_ = 0;
  std::vector<std::string> violations_;
};

}  // namespace upipe::sim
