#include "tests/kernels/kernels/support/op_check.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "gtest/gtest.h"
#include "hwy/targets.h"
#include "kernels/cpu/cpu_op_table.h"
#include "kernels/host/host_parallel_for.h"
#include "kernels/host/host_stream.h"
#include "kernels/reference/reference_op_table.h"
#include "tests/kernels/kernels/support/naive_backend.h"

namespace upipe::kernels::testing {
namespace {

constexpr double kHalfEpsilon = 0x1p-24;  // of fp32

// All results of the call over several seeds, joined per result.
std::vector<Memory::Result> RunSeeds(OpTable& ops, const BuildCall& build, int seeds,
                                     int num_threads) {
  std::vector<Memory::Result> joined;
  for (int seed = 1; seed <= seeds; ++seed) {
    Memory memory(seed);
    const OpParams params = build(memory);
    const absl::Status status = RunCall(ops, params, memory, num_threads);
    EXPECT_TRUE(status.ok()) << NameOf(params) << ": " << status;
    const std::vector<Memory::Result> results = memory.Results();
    if (joined.empty()) joined.resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      joined[i].name = results[i].name;
      joined[i].values.insert(joined[i].values.end(), results[i].values.begin(),
                              results[i].values.end());
    }
  }
  return joined;
}

// One pool per size for the whole test: threads are slow to make.
std::shared_ptr<ParallelFor> Pool(int num_threads) {
  static std::map<int, std::shared_ptr<ParallelFor>>& pools =
      *new std::map<int, std::shared_ptr<ParallelFor>>();
  std::shared_ptr<ParallelFor>& pool = pools[num_threads];
  if (pool == nullptr) pool = std::make_shared<HostParallelFor>(num_threads, std::vector<int>{});
  return pool;
}

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

void ExpectSameBits(const std::vector<Memory::Result>& a, const std::vector<Memory::Result>& b,
                    const char* what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(SameBits(a[i].values, b[i].values)) << a[i].name << ": " << what;
}

}  // namespace

OpTable& Reference() {
  static OpTable& table = *CreateReferenceOpTable().release();
  return table;
}

OpTable& Cpu() {
  static OpTable& table = *CreateCpuOpTable(1).release();
  return table;
}

OpTable& Naive() {
  static OpTable& table = *CreateNaiveOpTable().release();
  return table;
}

absl::Status RunCall(OpTable& ops, const OpParams& params, const Memory& memory, int num_threads) {
  constexpr size_t kAlignment = 256;
  const int64_t bytes = ops.WorkspaceBytes(params);
  std::vector<char> scratch(bytes + 2 * kAlignment, '\xff');
  char* aligned =
      scratch.data() + (kAlignment - reinterpret_cast<uintptr_t>(scratch.data()) % kAlignment);
  absl::Status status;
  {
    HostStream stream("test", Pool(num_threads), std::nullopt, {});
    status = ops.Enqueue(params, {aligned, bytes}, stream);
    if (status.ok()) status = stream.Synchronize();
  }
  for (const char* p = scratch.data(); p < scratch.data() + scratch.size(); ++p) {
    if (p == aligned) p += bytes;
    if (p == scratch.data() + scratch.size()) break;
    if (*p != '\xff') {
      ADD_FAILURE() << NameOf(params) << " wrote outside its workspace of " << bytes << " bytes";
      break;
    }
  }
  EXPECT_EQ(memory.Damage(), "") << NameOf(params);
  return status;
}

double RelativeError(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(b[i])) {
      error += (a[i] - b[i]) * (a[i] - b[i]);
      norm += b[i] * b[i];
    } else if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return error == 0 ? 0 : std::sqrt(error / norm);
}

void ForEachIsa(const std::function<void(const std::string& isa)>& body) {
  for (int64_t target : {HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SCALAR}) {
    hwy::SetSupportedTargetsForTest(0);
    if (target != HWY_SCALAR && (hwy::SupportedTargets() & target) == 0) continue;
    hwy::SetSupportedTargetsForTest(target);
    SCOPED_TRACE(hwy::TargetName(target));
    body(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
}

void ExpectCpuMatchesReference(const BuildCall& build, int seeds) {
  const std::vector<Memory::Result> reference = RunSeeds(Reference(), build, seeds, 1);
  const std::vector<Memory::Result> naive = RunSeeds(Naive(), build, seeds, 1);
  const auto expect_within_bound = [&](const std::vector<Memory::Result>& results,
                                       const char* what) {
    for (size_t i = 0; i < reference.size(); ++i) {
      const double bound = 3 * RelativeError(naive[i].values, reference[i].values) + kHalfEpsilon;
      EXPECT_LE(RelativeError(results[i].values, reference[i].values), bound)
          << reference[i].name << ", " << what;
    }
  };
  ForEachIsa([&](const std::string&) {
    expect_within_bound(RunSeeds(Cpu(), build, seeds, 1), "1 thread");
  });
  const std::vector<Memory::Result> once = RunSeeds(Cpu(), build, seeds, 1);
  ExpectSameBits(once, RunSeeds(Cpu(), build, seeds, 1), "two runs with 1 thread differ");
  const std::vector<Memory::Result> threads = RunSeeds(Cpu(), build, seeds, 3);
  expect_within_bound(threads, "3 threads");
  ExpectSameBits(threads, RunSeeds(Cpu(), build, seeds, 3), "two runs with 3 threads differ");
}

void ExpectCpuEqualsReference(const BuildCall& build) {
  const std::vector<Memory::Result> reference = RunSeeds(Reference(), build, 2, 1);
  ForEachIsa([&](const std::string&) {
    ExpectSameBits(RunSeeds(Cpu(), build, 2, 1), reference, "1 thread differs from the reference");
    ExpectSameBits(RunSeeds(Cpu(), build, 2, 3), reference, "3 threads differ from the reference");
  });
}

void ExpectBothFail(const BuildCall& build, absl::StatusCode code) {
  for (OpTable* ops : {&Reference(), &Cpu()}) {
    Memory memory(1);
    const OpParams params = build(memory);
    const absl::Status status = RunCall(*ops, params, memory);
    EXPECT_EQ(status.code(), code) << status;
  }
}

}  // namespace upipe::kernels::testing
