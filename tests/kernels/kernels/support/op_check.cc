#include "tests/kernels/kernels/support/op_check.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/host/host_parallel_for.h"
#include "kernels/host/host_stream.h"
#include "kernels/reference/reference_op_table.h"
#include "tests/kernels/kernels/support/naive_backend.h"

namespace upipe::kernels::testing {
namespace {

// Half the distance from 1 to the next number.
double HalfEpsilon(DType dtype) { return dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-24; }

// One call built from several seeds, to be run by one backend after another.
class SeededCalls {
 public:
  SeededCalls(const BuildCall& build, DType storage, int seeds) {
    for (int seed = 1; seed <= seeds; ++seed) {
      Call& call = calls_.emplace_back();
      call.memory = std::make_unique<Memory>(
          seed, storage,
          seed % 2 == 0 ? Memory::Alignment::kSixteenBytes : Memory::Alignment::kElement);
      call.params = build(*call.memory);
      call.memory->Seal();
    }
  }

  // All results of all seeds, joined per result, from memory as it was built.
  std::vector<Memory::Result> Run(OpTable& ops, int num_threads) {
    std::vector<Memory::Result> joined;
    for (Call& call : calls_) {
      call.memory->Restore();
      const absl::Status status = RunCall(ops, call.params, *call.memory, num_threads);
      EXPECT_TRUE(status.ok()) << NameOf(call.params) << ": " << status;
      const std::vector<Memory::Result> results = call.memory->Results();
      if (joined.empty()) {
        joined = results;
        continue;
      }
      for (size_t i = 0; i < results.size(); ++i) {
        joined[i].values.insert(joined[i].values.end(), results[i].values.begin(),
                                results[i].values.end());
      }
    }
    return joined;
  }

 private:
  struct Call {
    std::unique_ptr<Memory> memory;
    OpParams params;
  };
  std::vector<Call> calls_;
};

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

}  // namespace

OpTable& Reference() {
  static OpTable& table = *CreateReferenceOpTable().release();
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

void ExpectWithinTheBound(const std::vector<Memory::Result>& results,
                          const std::vector<Memory::Result>& naive,
                          const std::vector<Memory::Result>& reference, const std::string& what) {
  for (size_t i = 0; i < reference.size(); ++i) {
    const double bound =
        3 * RelativeError(naive[i].values, reference[i].values) + HalfEpsilon(reference[i].dtype);
    EXPECT_LE(RelativeError(results[i].values, reference[i].values), bound)
        << reference[i].name << ", " << what;
  }
}

void ExpectSameBits(const std::vector<Memory::Result>& a, const std::vector<Memory::Result>& b,
                    const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(SameBits(a[i].values, b[i].values)) << a[i].name << ": " << what;
}

void ForEachStorage(const std::function<void(DType storage)>& body) {
  for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(NameOf(storage));
    body(storage);
  }
}

void ExpectMatchesReference(const BuildCall& build, int seeds) {
  ForEachStorage([&](DType storage) { ExpectMatchesReferenceIn(storage, build, seeds); });
}

void ExpectMatchesReferenceIn(DType storage, const BuildCall& build, int seeds) {
  SeededCalls calls(build, storage, seeds);
  const std::vector<Memory::Result> reference = calls.Run(Reference(), 1);
  const std::vector<Memory::Result> naive = calls.Run(Naive(), 1);
  const auto expect_within_bound = [&](const std::vector<Memory::Result>& results,
                                       const char* what) {
    ExpectWithinTheBound(results, naive, reference, what);
  };
  ForEachVariant(
      [&](const std::string&) { expect_within_bound(calls.Run(Tested(), 1), "1 thread"); },
      storage);
  ExpectSameBits(calls.Run(Tested(), 1), calls.Run(Tested(), 1), "two runs with 1 thread differ");
  const std::vector<Memory::Result> threads = calls.Run(Tested(), 3);
  expect_within_bound(threads, "3 threads");
  ExpectSameBits(threads, calls.Run(Tested(), 3), "two runs with 3 threads differ");
}

void ExpectEqualsReference(const BuildCall& build) {
  ForEachStorage([&](DType storage) {
    SeededCalls calls(build, storage, 2);
    const std::vector<Memory::Result> reference = calls.Run(Reference(), 1);
    ForEachVariant(
        [&](const std::string&) {
          ExpectSameBits(calls.Run(Tested(), 1), reference, "1 thread differs from the reference");
          ExpectSameBits(calls.Run(Tested(), 3), reference, "3 threads differ from the reference");
        },
        storage);
  });
}

void SetSmallIntegers(const TensorView& view, int limit, Memory& memory) {
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    for (int64_t j = 0; j < view.shape[1]; ++j) {
      for (int64_t k = 0; k < view.shape[2]; ++k) {
        const auto draw = static_cast<int>(memory.random()() % (2 * limit + 1));
        SetElement(view, i, j, k, draw - limit);
      }
    }
  }
  memory.Seal();
}

void ExpectBothFail(const BuildCall& build, absl::StatusCode code) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const OpParams params = build(memory);
    const absl::Status status = RunCall(*ops, params, memory);
    EXPECT_EQ(status.code(), code) << status;
  }
}

}  // namespace upipe::kernels::testing
