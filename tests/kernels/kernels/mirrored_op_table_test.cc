// Op calls on host tensors that run on a device's copies: what is near, far apart, overlapping or
// damaged, over the cpu device.
#include "tests/kernels/kernels/support/mirrored_op_table.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "kernels/cpu/cpu_op_table.h"
#include "kernels/host/host_device.h"
#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

// The cpu backend, which also changes one byte so far from the start of what it writes.
class Careless final : public OpTable {
 public:
  explicit Careless(std::optional<int64_t> where) : where_(where) {}
  int64_t WorkspaceBytes(const OpParams& params) const override {
    return ops_->WorkspaceBytes(params);
  }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    const absl::Status status = ops_->Enqueue(params, workspace, stream);
    if (where_ && status.ok()) {
      stream.Submit([out = std::get<RowDotParams>(params).out, at = *where_](ExecContext&) {
        out.as<char>()[at] ^= 1;
        return absl::OkStatus();
      });
    }
    return status;
  }

 private:
  const std::unique_ptr<OpTable> ops_ = CreateCpuOpTable(1);
  const std::optional<int64_t> where_;
};

class MirroredOpTableTest : public ::testing::Test {
 protected:
  void Use(std::optional<int64_t> careless = {}) {
    mirrored_.reset();
    device_ = *HostDevice::Create({.arena_bytes = int64_t{2} << 30, .host_bytes = 1 << 20},
                                  std::make_unique<Careless>(careless));
    mirrored_ = CreateMirroredOpTable(*device_);
  }

  static RowDotParams Call(Memory& memory) {
    return {memory.Input({{5, 3, 8}, 2}), memory.Input({{5, 3, 8}}),
            memory.Output("out", {{5, 3}, 1}, kW)};
  }
  std::vector<Memory::Result> ResultsOf(OpTable& ops, const OpParams& params, Memory& memory) {
    memory.Restore();
    EXPECT_EQ(RunCall(ops, params, memory), absl::OkStatus());
    return memory.Results();
  }

  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<OpTable> mirrored_;
};

TEST_F(MirroredOpTableTest, GivesTheDevicesBits) {
  Use();
  Memory memory(1);
  const RowDotParams p = Call(memory);
  memory.Seal();
  const auto expected = ResultsOf(device_->ops(), p, memory);
  ExpectSameBits(ResultsOf(*mirrored_, p, memory), expected, "mirrored");
}

TEST_F(MirroredOpTableTest, OverlappingTensorsShareACopy) {
  Use();
  Memory memory(1);
  const TensorView x = memory.InOut("x", {{7, 24}, 1});
  const RmsNormFwdParams p = {.x = x, .weight = memory.Input({{24}}), .y = x};
  memory.Seal();
  const auto expected = ResultsOf(device_->ops(), p, memory);
  ExpectSameBits(ResultsOf(*mirrored_, p, memory), expected, "in place");
}

TEST_F(MirroredOpTableTest, RowsFarApartAreCopiedAlone) {
  Use();
  Memory memory(1), near_memory(1);
  const RowDotParams near = Call(near_memory);
  RowDotParams far = Call(memory);
  FarMemory space;
  // 5 rows over 400 MB, of which a few pages exist.
  far.a = space.Copy(far.a, 0, (int64_t{1} << 23) * 3);
  far.out = space.Copy(far.out, 0, (int64_t{1} << 23) * 3 + 8);
  ASSERT_EQ(RunCall(*mirrored_, far, memory), absl::OkStatus());
  ASSERT_EQ(RunCall(device_->ops(), near, near_memory), absl::OkStatus());
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t h = 0; h < 3; ++h) {
      EXPECT_EQ(GetElement(far.out, t, h), GetElement(near.out, t, h));
    }
  }
}

TEST_F(MirroredOpTableTest, TellsWhatIsWrittenBesideTensors) {
  // out is [5, 3] with a gap of one after each row but the last: 76 bytes.
  for (const int64_t at : {-1, 76, 4000}) {
    Use(at);
    Memory memory(1);
    const RowDotParams p = Call(memory);
    memory.Seal();
    const absl::Status status = RunCall(*mirrored_, p, memory);
    EXPECT_EQ(status.message(), "row_dot wrote beside a tensor") << at;
  }
  // In a gap: the damage comes back with the tensor.
  Use(13);
  Memory memory(1);
  const RowDotParams p = Call(memory);
  memory.Seal();
  EXPECT_EQ(memory.Damage(), "");
  EXPECT_NONFATAL_FAILURE(static_cast<void>(RunCall(*mirrored_, p, memory)), "changed");
}

TEST_F(MirroredOpTableTest, RefusesWhatTheDeviceCannotHold) {
  device_ =
      *HostDevice::Create({.arena_bytes = 1 << 10, .host_bytes = 1 << 10}, CreateCpuOpTable(1));
  mirrored_ = CreateMirroredOpTable(*device_);
  Memory memory(1);
  const RowDotParams p = Call(memory);
  memory.Seal();
  EXPECT_EQ(RunCall(*mirrored_, p, memory).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace upipe::kernels::testing
