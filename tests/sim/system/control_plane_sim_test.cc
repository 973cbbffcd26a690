// Runs seeds of the simulation. By hand:
//   control_plane_sim_test --seeds 100000 --first 1 --threads 2     the long form
//   control_plane_sim_test --replay 4711 [--guard "slot free"]      one seed, told step by step
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/sim/system/cluster.h"

namespace upipe::sim {
namespace {

using coordinator::Guard;
using coordinator::kNumGuards;
using coordinator::kNumRows;
using coordinator::Row;

constexpr int64_t kLeastSteps = 2000;
constexpr int64_t kLeastFaults = 20;
constexpr int kSeedsToCatch = 1000;  // a broken guard

struct Flags {
  uint64_t first = 1;
  uint64_t seeds = 2000;
  unsigned threads = 0;  // 0: one per core
  std::optional<uint64_t> replay;
  std::optional<Guard> guard;
};
Flags flags;

struct Totals {
  std::mutex mutex;
  std::array<int64_t, kNumRows> fired = {};
  int64_t steps = 0;
  int64_t faults = 0;
  std::vector<std::string> failures;
};

void Judge(uint64_t seed, const Outcome& outcome, Totals& totals) {
  std::lock_guard lock(totals.mutex);
  for (size_t row = 0; row < kNumRows; ++row) totals.fired[row] += outcome.fired[row];
  totals.steps += outcome.steps;
  totals.faults += outcome.faults;
  std::vector<std::string> wrong = outcome.violations;
  if (outcome.steps < kLeastSteps || outcome.faults < kLeastFaults) {
    wrong.push_back(absl::StrCat("only ", outcome.steps, " steps and ", outcome.faults, " faults"));
  }
  if (wrong.empty()) return;
  totals.failures.push_back(
      absl::StrCat("seed ", seed, " (--replay ", seed, "): ", absl::StrJoin(wrong, "\n    ")));
}

// Every seed of `first` and the `seeds` after it, over all cores, until a few have failed.
void RunSeeds(uint64_t first, uint64_t seeds, Totals& totals) {
  constexpr size_t kMaxFailures = 10;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  std::atomic<uint64_t> next = first;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < (flags.threads > 0 ? flags.threads : cores); ++t) {
    threads.emplace_back([&] {
      while (true) {
        const uint64_t seed = next++;
        if (seed >= first + seeds) return;
        {
          std::lock_guard lock(totals.mutex);
          if (totals.failures.size() >= kMaxFailures) return;
        }
        Judge(seed, Cluster({.seed = seed}).Run(), totals);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ControlPlaneSim, EverySeedHoldsAndEveryRowFires) {
  Totals totals;
  RunSeeds(flags.first, flags.seeds, totals);
  std::printf("%llu seeds, %lld steps, %lld faults; how often each row of the table fired:\n",
              static_cast<unsigned long long>(flags.seeds), static_cast<long long>(totals.steps),
              static_cast<long long>(totals.faults));
  for (size_t row = 0; row < kNumRows; ++row) {
    std::printf("  %-24s %10lld\n", NameOf(static_cast<Row>(row)),
                static_cast<long long>(totals.fired[row]));
    if (totals.failures.empty()) {
      EXPECT_GT(totals.fired[row], 0)
          << "no seed came to '" << NameOf(static_cast<Row>(row)) << "'";
    }
  }
  EXPECT_TRUE(totals.failures.empty()) << absl::StrJoin(totals.failures, "\n");
}

TEST(ControlPlaneSim, ASeedReplays) {
  for (const uint64_t seed : {flags.first, flags.first + 1}) {
    const Outcome once = Cluster({.seed = seed}).Run();
    const Outcome again = Cluster({.seed = seed}).Run();
    EXPECT_EQ(once.digest, again.digest) << "seed " << seed;
    EXPECT_EQ(once.steps, again.steps);
  }
}

// Without one of its guards the table breaks something that is seen.
class BrokenGuard : public testing::TestWithParam<int> {};

TEST_P(BrokenGuard, IsCaught) {
  const Guard guard = static_cast<Guard>(GetParam());
  for (int seed = 1; seed <= kSeedsToCatch; ++seed) {
    const Outcome outcome = Cluster({.seed = static_cast<uint64_t>(seed), .broken = guard}).Run();
    if (outcome.violations.empty()) continue;
    std::printf("seed %d: %s\n", seed, outcome.violations[0].c_str());
    return;
  }
  FAIL() << "nobody noticed in " << kSeedsToCatch << " seeds that '" << NameOf(guard)
         << "' holds no more";
}

INSTANTIATE_TEST_SUITE_P(Guards, BrokenGuard, testing::Range(0, static_cast<int>(kNumGuards)),
                         [](const testing::TestParamInfo<int>& info) {
                           std::string name = NameOf(static_cast<Guard>(info.param));
                           std::erase_if(name, [](char c) { return !isalnum(c); });
                           return name;
                         });

int Replay() {
  const Outcome outcome =
      Cluster({.seed = *flags.replay, .broken = flags.guard, .verbose = true}).Run();
  for (const std::string& violation : outcome.violations) {
    std::printf("VIOLATION %s\n", violation.c_str());
  }
  std::printf("%lld steps, %lld faults\n", static_cast<long long>(outcome.steps),
              static_cast<long long>(outcome.faults));
  return outcome.violations.empty() ? 0 : 1;
}

std::optional<Guard> GuardOf(const std::string& name) {
  for (size_t guard = 0; guard < kNumGuards; ++guard) {
    if (name == NameOf(static_cast<Guard>(guard))) return static_cast<Guard>(guard);
  }
  return std::nullopt;
}

// False when it is none of ours.
bool ReadFlag(const std::string& name, const std::string& value) {
  uint64_t number = 0;
  const bool is_number = absl::SimpleAtoi(value, &number);
  if (name == "--guard") return (flags.guard = GuardOf(value)).has_value();
  if (!is_number) return false;
  if (name == "--first") flags.first = number;
  if (name == "--seeds") flags.seeds = number;
  if (name == "--threads") flags.threads = static_cast<unsigned>(number);
  if (name == "--replay") flags.replay = number;
  return name == "--first" || name == "--seeds" || name == "--threads" || name == "--replay";
}

int Main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 < argc && ReadFlag(argv[i], argv[i + 1])) continue;
    std::fprintf(stderr,
                 "usage: %s [--seeds N] [--first SEED] [--threads N] [--replay SEED] [--guard NAME]"
                 "\n",
                 argv[0]);
    return 2;
  }
  return flags.replay ? Replay() : RUN_ALL_TESTS();
}

}  // namespace
}  // namespace upipe::sim

int main(int argc, char** argv) { return upipe::sim::Main(argc, argv); }
