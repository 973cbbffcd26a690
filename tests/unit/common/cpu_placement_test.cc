// Which CPUs ranks get on machines that this one is not, and that no two get the same.
#include "common/cpu_placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"

namespace upipe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Linux numbers the first thread of every core first: cpu i and i + cores are siblings.
std::vector<Cpu> Machine(int cores, int threads_per_core, int nodes) {
  std::vector<Cpu> cpus;
  for (int id = 0; id < cores * threads_per_core; ++id) {
    const int core = id % cores;
    cpus.push_back({.id = id, .core = core, .node = core * nodes / cores});
  }
  return cpus;
}

std::vector<Cpu> Only(const std::vector<Cpu>& cpus, const std::set<int>& ids) {
  std::vector<Cpu> some;
  for (const Cpu& cpu : cpus) {
    if (ids.contains(cpu.id)) some.push_back(cpu);
  }
  return some;
}

std::vector<int> Allowed() {
  absl::StatusOr<std::vector<int>> cpus = AllowedCpus();
  EXPECT_TRUE(cpus.ok()) << cpus.status();
  return *std::move(cpus);
}

// What ranks that come one after the other get.
std::vector<std::vector<int>> InTurn(const std::vector<Cpu>& allowed, int num_ranks, int threads) {
  std::set<int> taken;
  std::vector<std::vector<int>> given;
  for (int rank = 0; rank < num_ranks; ++rank) {
    given.push_back(ChooseCpus(allowed, taken, threads));
    for (const int cpu : given.back()) EXPECT_TRUE(taken.insert(cpu).second) << cpu << " twice";
  }
  return given;
}

TEST(ChooseCpus, CoresBeforeTheirSiblings) {
  const std::vector<Cpu> smt = Machine(4, 2, 1);
  EXPECT_THAT(InTurn(smt, 4, 1),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2), ElementsAre(3)));
  EXPECT_THAT(InTurn(smt, 5, 2), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3),
                                             ElementsAre(4, 5), ElementsAre(6, 7), IsEmpty()));
  EXPECT_THAT(ChooseCpus(smt, {}, 6), ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(ChooseCpus(smt, {0, 5}, 2), ElementsAre(2, 3));  // cores 0 and 1 are half taken
}

TEST(ChooseCpus, SiblingsMayBeNeighboursToo) {
  const std::vector<Cpu> cpus = {
      {.id = 0, .core = 0}, {.id = 1, .core = 0}, {.id = 2, .core = 2}, {.id = 3, .core = 2}};
  EXPECT_THAT(ChooseCpus(cpus, {}, 2), ElementsAre(0, 2));
}

TEST(ChooseCpus, OneNumaNodeWherePossible) {
  const std::vector<Cpu> two = Machine(8, 1, 2);  // 0-3, 4-7
  EXPECT_THAT(InTurn(two, 2, 3), ElementsAre(ElementsAre(0, 1, 2), ElementsAre(4, 5, 6)));
  EXPECT_THAT(ChooseCpus(two, {0, 1, 2, 4, 5, 6}, 2), ElementsAre(3, 7));  // over both
  EXPECT_THAT(ChooseCpus(two, {0, 1}, 2), ElementsAre(2, 3));  // the fuller node that suffices
  EXPECT_THAT(ChooseCpus(two, {4, 5}, 2), ElementsAre(6, 7));
  EXPECT_THAT(ChooseCpus(two, {0, 4}, 6), ElementsAre(1, 2, 3, 5, 6, 7));
  // Cores come first, nodes second: one core on each node rather than two siblings of one.
  const std::vector<Cpu> smt = Machine(4, 2, 2);  // node 0: cores 0, 1; node 1: cores 2, 3
  EXPECT_THAT(ChooseCpus(smt, {0, 2}, 2), ElementsAre(1, 3));
  EXPECT_THAT(ChooseCpus(smt, {0, 1, 2, 3}, 2), ElementsAre(4, 5));
  EXPECT_THAT(ChooseCpus(smt, {0, 1, 2, 3, 4}, 2), ElementsAre(6, 7));
}

TEST(ChooseCpus, WithinWhatACgroupAllows) {
  const std::vector<Cpu> some = Only(Machine(8, 2, 2), {3, 5, 6, 11});  // 3 and 11 are siblings
  EXPECT_THAT(InTurn(some, 3, 2), ElementsAre(ElementsAre(5, 6), ElementsAre(3, 11), IsEmpty()));
  EXPECT_THAT(ChooseCpus(some, {}, 3), ElementsAre(3, 5, 6));
  EXPECT_THAT(ChooseCpus(some, {}, 5), IsEmpty());
  EXPECT_THAT(ChooseCpus({}, {}, 1), IsEmpty());
}

TEST(CpuList, AsTheKernelWritesIt) {
  EXPECT_EQ(FormatCpuList({8, 0, 1, 3, 2}), "0-3,8");
  EXPECT_EQ(FormatCpuList({}), "");
  EXPECT_THAT(*ParseCpuList("0-3,8\n"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(*ParseCpuList("5"), ElementsAre(5));
  for (const char* wrong : {"x", "3-1", "0-", "-2", "1,,x", "99999999999", "0-1000000"}) {
    EXPECT_EQ(ParseCpuList(wrong).status().code(), absl::StatusCode::kInvalidArgument) << wrong;
  }
}

// A folder like the kernel's, for the CPUs that this process really may use.
class CpuFolder : public ::testing::Test {
 protected:
  CpuFolder() : folder_(std::filesystem::temp_directory_path() / "upipe-cpus-XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    for (const int cpu : Allowed()) MakeCpu(cpu, absl::StrCat(cpu), 0);
    num_cpus_ = static_cast<int>(Allowed().size());
  }
  ~CpuFolder() override { std::filesystem::remove_all(folder_); }
  void MakeCpu(int cpu, const std::string& siblings, int node) const {
    const std::string path = absl::StrCat(folder_, "/cpu", cpu);
    std::filesystem::create_directories(path + "/topology");
    std::filesystem::create_directories(absl::StrCat(path, "/node", node));
    std::ofstream(path + "/topology/thread_siblings_list") << siblings << "\n";
  }
  std::string folder_;
  int num_cpus_ = 0;
};

TEST_F(CpuFolder, IsReadAsTheKernelWritesIt) {
  MakeCpu(20, "20,84", 0);
  MakeCpu(84, "20,84", 1);
  EXPECT_THAT(ReadCpus(folder_, {20, 84, 99}), ElementsAre(Cpu{.id = 20, .core = 20, .node = 0},
                                                           Cpu{.id = 84, .core = 20, .node = 1},
                                                           Cpu{.id = 99, .core = 99, .node = 0}));
}

TEST_F(CpuFolder, AClaimIsHeldUntilItsEnd) {
  absl::StatusOr<CpuClaim> all = CpuClaim::Take(1, num_cpus_, folder_);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->cpus(), Allowed());
  const absl::Status none = CpuClaim::Take(1, 1, folder_).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(none.message(), HasSubstr("other ranks hold " + FormatCpuList(Allowed())));
  {
    const CpuClaim moved = *std::move(all);
    EXPECT_FALSE(CpuClaim::Take(1, 1, folder_).ok());
  }
  EXPECT_TRUE(CpuClaim::Take(1, 1, folder_).ok());
}

TEST_F(CpuFolder, NoneWhenTheGangIsLargerThanTheNode) {
  const absl::Status none = CpuClaim::Take(num_cpus_ + 1, 1, folder_).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(none.message(), HasSubstr(absl::StrCat(num_cpus_ + 1, " ranks x 1 threads")));
  EXPECT_TRUE(CpuClaim::Take(num_cpus_, 1, folder_).ok());
}

TEST_F(CpuFolder, WithoutTheKernelsWordThereIsNoClaim) {
  EXPECT_THAT(CpuClaim::Take(1, 1, folder_ + "/none").status().message(), HasSubstr("cannot open"));
}

// As trainers start: all at once, and there is exactly enough.
TEST_F(CpuFolder, RanksThatChooseAtOnceAllGetTheirOwn) {
  for (int round = 0; round < 20; ++round) {
    std::vector<absl::StatusOr<CpuClaim>> claims(num_cpus_);
    std::vector<std::thread> threads;
    for (auto& claim : claims) {
      threads.emplace_back([&] { claim = CpuClaim::Take(num_cpus_, 1, folder_); });
    }
    for (std::thread& thread : threads) thread.join();
    std::set<int> cpus;
    for (const auto& claim : claims) {
      ASSERT_TRUE(claim.ok()) << claim.status();
      for (const int cpu : claim->cpus()) cpus.insert(cpu);
    }
    EXPECT_THAT(cpus, SizeIs(num_cpus_));
  }
}

TEST(PlaceProcess, ReachesThreadsThatRun) {
  const std::vector<int> before = Allowed();
  std::atomic<bool> done = false;
  std::vector<int> seen;
  std::thread other([&] {
    while (!done) std::this_thread::yield();
    seen = Allowed();
  });
  EXPECT_TRUE(PlaceProcess({before.back()}).ok());
  done = true;
  other.join();
  EXPECT_THAT(seen, ElementsAre(before.back()));
  EXPECT_THAT(Allowed(), ElementsAre(before.back()));
  std::thread([&] { seen = Allowed(); }).join();
  EXPECT_THAT(seen, ElementsAre(before.back()));
  EXPECT_TRUE(PlaceProcess(before).ok());
  EXPECT_THAT(PlaceThisThread({1023}).message(), HasSubstr("cannot run on cpus 1023"));
}

}  // namespace
}  // namespace upipe
