// Many seeds of the simulated cluster. UPIPE_SIM_SEED=n replays one; a failure prints it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "absl/strings/numbers.h"
#include "tests/sim/coordinator/cluster.h"

namespace upipe::coordinator {
namespace {

constexpr uint64_t kFirstSeed = 1;
constexpr int kSeeds = 25;
constexpr absl::Duration kFaulty = absl::Seconds(120);

Cluster::Outcome RunSeed(uint64_t seed) {
  Cluster::Outcome outcome = Cluster(seed).Run(kFaulty);
  for (const std::string& violation : outcome.violations) {
    ADD_FAILURE() << "UPIPE_SIM_SEED=" << seed << " " << violation;
  }
  return outcome;
}

TEST(CoordinatorSim, KeepsItsPromisesUnderFaults) {
  uint64_t first = kFirstSeed;
  int seeds = kSeeds;
  if (const char* replay = std::getenv("UPIPE_SIM_SEED"); replay != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(replay, &first)) << "UPIPE_SIM_SEED is not a number: " << replay;
    seeds = 1;
  }
  Cluster::Outcome total;
  for (int i = 0; i < seeds && !HasFailure(); ++i) {
    const Cluster::Outcome outcome = RunSeed(first + i);
    total.succeeded += outcome.succeeded;
    total.failed += outcome.failed;
    total.cancelled += outcome.cancelled;
    total.coordinator_crashes += outcome.coordinator_crashes;
    total.worker_crashes += outcome.worker_crashes;
    total.breaks += outcome.breaks;
    total.events += outcome.events;
  }
  std::cout << seeds << " seeds from " << first << ": " << total.events << " events, jobs "
            << total.succeeded << " succeeded, " << total.failed << " failed, " << total.cancelled
            << " cancelled; " << total.coordinator_crashes << " coordinator crashes, "
            << total.worker_crashes << " worker crashes, " << total.breaks << " broken sessions\n";
  // A simulation in which nothing happens proves nothing.
  EXPECT_GT(total.succeeded, seeds);
  EXPECT_GT(total.failed, seeds);
  EXPECT_GT(total.cancelled, 0);
}

TEST(CoordinatorSim, TheSameSeedGivesTheSameRun) {
  const Cluster::Outcome a = RunSeed(7);
  const Cluster::Outcome b = RunSeed(7);
  EXPECT_EQ(a.events, b.events);
  EXPECT_EQ(a.succeeded, b.succeeded);
  EXPECT_EQ(a.failed, b.failed);
}

}  // namespace
}  // namespace upipe::coordinator
