// Backends by name, and that the devices they give run ops.
#include "kernels/device_factory.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::kernels {
namespace {

using testing::HasSubstr;

TEST(DeviceFactory, CpuAndReferenceRunOps) {
  for (const std::string backend : {"cpu", "reference"}) {
    auto device = CreateDevice({.backend = backend, .arena_bytes = 1 << 20, .num_threads = 2});
    ASSERT_TRUE(device.ok()) << device.status();
    EXPECT_EQ((*device)->name(), backend);
    const auto stream = (*device)->CreateStream("compute");
    const auto buffer = (*device)->allocator().Allocate(MemoryTag::kMlp, 400, *stream);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    const OpParams fill =
        FillParams{.dst = TensorView::Vector(buffer->data(), DType::kFloat32, 100), .value = 1.5};
    ASSERT_EQ((*device)->ops().WorkspaceBytes(fill), 0);
    ASSERT_TRUE((*device)->ops().Enqueue(fill, {}, *stream).ok());
    std::vector<float> host(100);
    (*device)->CopyToHost(host.data(), buffer->data(), 400, *stream);
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_EQ(host, std::vector<float>(100, 1.5f));
  }
}

// Ops of the device and of the host at once, on a plain and on a delayed, poisoned device.
TEST(DeviceFactory, CpuAndReferenceHaveHostMemoryAndItsOps) {
  for (const std::string backend : {"cpu", "reference"}) {
    for (const bool test_device : {false, true}) {
      DeviceOptions options = {.backend = backend, .arena_bytes = 1 << 16, .host_bytes = 1 << 16};
      if (test_device) options.test_delay = StreamDelay{.seed = 5};
      options.test_poison_freed = test_device;
      auto created = CreateDevice(options);
      ASSERT_TRUE(created.ok()) << created.status();
      Device& device = **created;
      const auto compute = device.CreateStream("compute");
      const auto copy = device.CreateStream("copy");
      const auto host = device.CreateHostStream("host");
      const auto there = device.host_allocator().Allocate(MemoryTag::kOptimizer, 400, *host);
      const auto here = device.allocator().Allocate(MemoryTag::kGradients, 400, *compute);
      ASSERT_TRUE(there.ok() && here.ok());
      const auto view = [](const Buffer& buffer) {
        return TensorView::Vector(buffer.data(), DType::kFloat32, 100);
      };
      const FillParams on_device = {.dst = view(*here), .value = 1.5};
      const FillParams on_host = {.dst = view(*there), .value = -4};
      ASSERT_TRUE(device.ops().Enqueue(on_device, {}, *compute).ok());
      ASSERT_TRUE(device.host_ops().Enqueue(on_host, {}, *host).ok());
      // Every second element of what the host computed, over what the device did.
      copy->Wait(compute->Record());
      copy->Wait(host->Record());
      device.CopyRowsFromHost({.dst = here->data(),
                               .dst_stride = 8,
                               .src = there->data(),
                               .src_stride = 8,
                               .row_bytes = 4,
                               .rows = 50},
                              *copy);
      std::vector<float> seen(100);
      device.CopyToHost(seen.data(), here->data(), 400, *copy);
      ASSERT_TRUE(copy->Synchronize().ok());
      for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i % 2 == 0 ? -4.0f : 1.5f);
    }
  }
}

TEST(DeviceFactory, DryAnswersWorkspaceForTheBackendItStandsInFor) {
  auto dry = CreateDryDevice("cpu");
  ASSERT_TRUE(dry.ok()) << dry.status();
  EXPECT_EQ((*dry)->name(), "dry(cpu)");
  auto real = CreateDevice({.backend = "cpu"});
  ASSERT_TRUE(real.ok()) << real.status();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const auto matrix = [&](int64_t rows, int64_t cols) {
      return TensorView::Matrix(nullptr, dtype, rows, cols);
    };
    const OpParams matmul =
        MatmulParams{.a = matrix(300, 200), .b = matrix(200, 100), .c = matrix(300, 100)};
    EXPECT_EQ((*dry)->ops().WorkspaceBytes(matmul), (*real)->ops().WorkspaceBytes(matmul));
  }
}

TEST(DeviceFactory, RefusesBackendsItDoesNotHave) {
  // In a build with the backend: that this machine has no GPU, if it has none.
  const absl::Status cuda = CreateDevice({.backend = "cuda"}).status();
  EXPECT_TRUE(cuda.ok() || absl::IsFailedPrecondition(cuda)) << cuda;
  if (const absl::Status built = CheckBackend("cuda"); !built.ok()) {
    EXPECT_EQ(built, cuda);
    EXPECT_THAT(std::string(cuda.message()), HasSubstr("no CUDA backend"));
    EXPECT_THAT(std::string(cuda.message()), HasSubstr("-DUPIPE_WITH_CUDA=ON"));
    EXPECT_THAT(std::string(cuda.message()), HasSubstr("use cpu"));
  }
  EXPECT_TRUE(CreateDryDevice("cuda").ok()) << "plans can be made for it";
  const absl::Status unknown = CreateDevice({.backend = "tpu"}).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("\"tpu\""));
}

}  // namespace
}  // namespace upipe::kernels
