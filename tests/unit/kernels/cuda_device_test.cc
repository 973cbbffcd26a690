// What a CUDA device adds to the contract of devices: waits between CUDA and host streams, errors
// that cross streams, device faults that say where, pinned blocks, and sentences with numbers.
#include "kernels/cuda/cuda_device.h"

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/api/device_fault.h"
#include "kernels/cuda/copy_pieces.h"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/numa_node.h"
#include "kernels/reference/reference_op_table.h"
#include "tests/support/cuda_runtime/fake_runtime.h"

namespace upipe::kernels {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Runtime = testing::FakeCudaRuntime;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

absl::StatusOr<std::unique_ptr<CudaDevice>> Create(const CudaDevice::Options& options,
                                                   std::shared_ptr<Runtime> runtime) {
  return CudaDevice::Create(options, std::move(runtime), CreateReferenceOpTable(),
                            CreateReferenceOpTable());
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaStream& Cuda(const std::unique_ptr<Stream>& stream) { return CudaStream::Of(*stream); }

  const std::shared_ptr<Runtime> runtime_ = std::make_shared<Runtime>();
  const std::unique_ptr<CudaDevice> device_ = *Create(
      {.arena_bytes = 1 << 16, .host_bytes = 1 << 16, .pinned_block_bytes = 1 << 12}, runtime_);
};

TEST_F(CudaDeviceTest, StreamsOfBothKindsWaitForEachOther) {
  const auto cuda = device_->CreateStream("copy");
  const auto host = device_->CreateHostStream("host");
  std::string order;
  std::promise<void> gate;
  const auto append = [&order](const char* what) {
    return [&order, what](ExecContext&) {
      order += what;
      return absl::OkStatus();
    };
  };
  host->Submit([&](ExecContext&) {
    gate.get_future().wait();
    return absl::OkStatus();
  });
  host->Submit(append("host "));
  cuda->Wait(host->Record());
  cuda->Submit(append("cuda "));
  host->Wait(cuda->Record());
  host->Submit(append("host "));
  cuda->Wait(host->Record());
  cuda->Submit(append("cuda"));
  const Event last = cuda->Record();
  EXPECT_FALSE(last.Done());
  gate.set_value();
  ASSERT_TRUE(last.Synchronize().ok());
  EXPECT_EQ(order, "host cuda host cuda");
}

TEST_F(CudaDeviceTest, AHostStreamsErrorBecomesThatOfAStreamThatWaits) {
  const auto cuda = device_->CreateStream("copy");
  const auto host = device_->CreateHostStream("host");
  std::promise<void> gate;
  host->Submit([&](ExecContext&) -> absl::Status {
    gate.get_future().wait();
    return absl::OutOfRangeError("on the host");
  });
  const Event before = cuda->Record();
  cuda->Wait(host->Record());
  bool ran = false;
  cuda->Submit([&ran](ExecContext&) {
    ran = true;
    return absl::OkStatus();
  });
  gate.set_value();
  EXPECT_EQ(cuda->Synchronize().message(), "on the host");
  EXPECT_TRUE(before.Synchronize().ok());
  EXPECT_FALSE(ran);
  // The same where the point is long reached.
  const auto late = device_->CreateStream("late");
  late->Wait(host->Record());
  EXPECT_EQ(late->Synchronize().message(), "on the host");
}

TEST_F(CudaDeviceTest, AnErrorCrossesAChainOfStreamsThatWaited) {
  const auto a = device_->CreateStream("a");
  const auto b = device_->CreateStream("b");
  const auto c = device_->CreateStream("c");
  std::promise<void> gate;
  const Event before = [&] {
    c->Submit([](ExecContext&) { return absl::OkStatus(); });
    return c->Record();
  }();
  a->Submit([&](ExecContext&) -> absl::Status {
    gate.get_future().wait();
    return absl::DataLossError("first");
  });
  // Back and forth, so that what each waits for is a web and not a line.
  for (int i = 0; i < 200; ++i) {
    b->Wait(a->Record());
    a->Wait(b->Record());
    c->Wait(b->Record());
  }
  bool ran = false;
  c->Submit([&ran](ExecContext&) {
    ran = true;
    return absl::OkStatus();
  });
  const Event after = c->Record();
  gate.set_value();
  EXPECT_EQ(after.Synchronize().message(), "first");
  EXPECT_TRUE(before.Synchronize().ok());
  EXPECT_FALSE(ran);
}

// A collective that ended on its own stream, with what its communicator says of it.
class Outcome final : public Event::State {
 public:
  Outcome(Event end, absl::Status said) : end_(std::move(end)), said_(std::move(said)) {}
  bool Done() const override { return end_.Done(); }
  absl::Status Synchronize() override {
    ++asked;
    EXPECT_TRUE(end_.Done()) << "asked before its point was passed";
    return end_.Synchronize().ok() ? said_ : end_.Synchronize();
  }
  const State* point() const override { return end_.state().get(); }
  std::atomic<int> asked{0};

 private:
  const Event end_;
  const absl::Status said_;
};

TEST_F(CudaDeviceTest, AnOutcomeIsAskedWhenItsPointWasPassed) {
  for (const absl::Status& said : {absl::OkStatus(), absl::UnavailableError("rank 1 left")}) {
    const auto comm = device_->CreateStream("comm");
    const auto compute = device_->CreateStream("compute");
    const auto side = device_->CreateStream("side");
    std::promise<void> gate;
    comm->Submit([&](ExecContext&) {
      gate.get_future().wait();
      return absl::OkStatus();
    });
    const auto outcome = std::make_shared<Outcome>(comm->Record(), said);
    compute->Wait(Event(outcome));
    compute->Submit([](ExecContext&) { return absl::OkStatus(); });
    side->Wait(compute->Record());
    const Event last = side->Record();
    EXPECT_EQ(outcome->asked, 0);
    gate.set_value();
    EXPECT_EQ(last.Synchronize(), said);
    EXPECT_EQ(compute->Synchronize(), said);
    EXPECT_GT(outcome->asked, 0);
    EXPECT_TRUE(comm->Synchronize().ok());
  }
}

TEST_F(CudaDeviceTest, ADeviceFaultNamesOpAndMomentAndEndsEverything) {
  const auto stream = device_->CreateStream("compute0");
  const auto other = device_->CreateStream("copy");
  std::promise<void> gate;
  stream->Submit([&](ExecContext&) {
    gate.get_future().wait();
    return absl::OkStatus();
  });
  const Event before = stream->Record();
  const auto nothing = [](CudaStreamHandle) { return absl::OkStatus(); };
  device_->allocator().set_moment("forward layer 0");
  Cuda(stream).Issue("matmul", nothing);
  gate.set_value();
  ASSERT_TRUE(stream->Synchronize().ok());  // so far nothing has failed
  device_->allocator().set_moment("backward layer 3 stage 1");
  Cuda(stream).Issue("attention_bwd", nothing);
  const Event event = stream->Record();
  Cuda(stream).Issue("strided_copy", nothing);
  runtime_->BreakDevice("cudaErrorIllegalAddress: an illegal memory access was encountered");
  const absl::Status status = event.Synchronize();
  EXPECT_TRUE(IsDeviceFault(status)) << status;
  EXPECT_EQ(
      Message(status),
      "device fault: cudaErrorIllegalAddress: an illegal memory access was encountered on "
      "stream compute0 of GPU 3 (Fake), in attention_bwd of backward layer 3 stage 1 or one of "
      "the 1 issued after it, up to strided_copy of backward layer 3 stage 1");
  EXPECT_TRUE(before.Synchronize().ok());
  EXPECT_TRUE(IsDeviceFault(stream->Synchronize()));
  bool issued = false, ran = false;
  Cuda(stream).Issue("fill", [&](CudaStreamHandle) {
    issued = true;
    return absl::OkStatus();
  });
  other->Submit([&](ExecContext&) {
    ran = true;
    return absl::OkStatus();
  });
  EXPECT_FALSE(issued);
  EXPECT_TRUE(IsDeviceFault(other->Synchronize()));
  EXPECT_FALSE(ran);
  const auto late = device_->CreateStream("late");
  late->Submit([&](ExecContext&) { return absl::OkStatus(); });
  EXPECT_TRUE(IsDeviceFault(late->Synchronize()));
}

TEST_F(CudaDeviceTest, ATaskLeftBehindByAFaultIsDroppedWithItsStream) {
  auto stream = device_->CreateStream("compute");
  std::promise<void> gate;
  const auto held = std::make_shared<int>(1);
  stream->Submit([&](ExecContext&) {
    gate.get_future().wait();
    return absl::OkStatus();
  });
  stream->Submit([held](ExecContext&) { return absl::OkStatus(); });
  runtime_->BreakDevice("gone");
  gate.set_value();
  EXPECT_TRUE(IsDeviceFault(stream->Synchronize()));
  EXPECT_EQ(held.use_count(), 2);
  stream.reset();
  EXPECT_EQ(held.use_count(), 1);
}

TEST_F(CudaDeviceTest, BadDataThatAKernelReportsFailsTheStream) {
  const auto stream = device_->CreateStream("compute");
  Cuda(stream).Issue("embedding_fwd", [&](CudaStreamHandle) {
    int64_t* words = Cuda(stream).fault_words();
    EXPECT_EQ(words[0], cuda::kNoFault[0]);
    words[1] = int64_t{static_cast<int>(cuda::FaultKind::kEmbeddingToken)} << 32 | 32'000;
    words[0] = int64_t{7} << 32 | 50'000;
    return absl::OkStatus();
  });
  const absl::Status status = stream->Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(Message(status),
            "embedding: token 50000 at row 7 is outside the vocabulary [0, 32000)");
}

TEST_F(CudaDeviceTest, EventsAreUsedAgain) {
  const auto stream = device_->CreateStream("compute");
  const auto other = device_->CreateStream("copy");
  for (int i = 0; i < 1000; ++i) {
    stream->Submit([](ExecContext&) { return absl::OkStatus(); });
    other->Wait(stream->Record());
    other->Submit([](ExecContext&) { return absl::OkStatus(); });
  }
  ASSERT_TRUE(other->Synchronize().ok());
  EXPECT_LE(runtime_->events_made(), 4);
}

TEST_F(CudaDeviceTest, CopiesOfThePoolAreCutWhereItsBlocksMeet) {
  const auto stream = device_->CreateStream("copy");
  EXPECT_EQ(runtime_->registered().size(), 16u);
  const auto host = *device_->host_allocator().Allocate(MemoryTag::kMlp, 3 << 12, *stream);
  const auto device = *device_->allocator().Allocate(MemoryTag::kMlp, 3 << 12, *stream);
  auto* bytes = static_cast<unsigned char*>(host.data());
  std::iota(bytes, bytes + host.size_bytes(), 0);
  device_->CopyFromHost(device.data(), host.data(), host.size_bytes(), *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(runtime_->copies(), 3);
  EXPECT_EQ(std::memcmp(device.data(), host.data(), static_cast<size_t>(host.size_bytes())), 0);
  std::memset(host.data(), 0, static_cast<size_t>(host.size_bytes()));
  device_->CopyRowsToHost({.dst = bytes + 100,
                           .dst_stride = 1000,
                           .src = device.data(),
                           .src_stride = 700,
                           .row_bytes = 600,
                           .rows = 12},
                          *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  for (int row = 0; row < 12; ++row) {
    const auto* from = static_cast<unsigned char*>(device.data()) + row * 700;
    EXPECT_EQ(std::memcmp(bytes + 100 + row * 1000, from, 600), 0) << row;
    EXPECT_EQ(bytes[100 + row * 1000 + 600], 0) << row;
  }
}

TEST(CopyPieces, AreWholeWhereNothingCutsThem) {
  char memory[1];
  const RowsCopy rows{.dst = memory,
                      .dst_stride = 80,
                      .src = memory,
                      .src_stride = 64,
                      .row_bytes = 64,
                      .rows = 1000};
  EXPECT_EQ(CopyPieces(rows, true, {}, 1 << 16).size(), 1u);
  EXPECT_EQ(CopyPieces(rows, true, {}, 79).size(), 1000u) << "rows too far apart for the device";
  EXPECT_TRUE(CopyPieces({.row_bytes = 5, .rows = 0}, true, {}, 1).empty());
  RowsCopy dense = rows;
  dense.dst_stride = 64;
  const auto pieces = CopyPieces(dense, true, {}, 1);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].row_bytes, 64'000);
}

TEST(CopyPieces, KeepOffsetsBeyond32Bits) {
  // 5 million rows of 8 KiB of a matrix in a pool of 1 GiB blocks: 40 GiB.
  auto* const pool = reinterpret_cast<char*>(uintptr_t{1} << 44);
  auto* const device = reinterpret_cast<char*>(uintptr_t{1} << 46);
  const HostBlocks blocks{pool, int64_t{1} << 30};
  const RowsCopy copy{.dst = pool + 256,
                      .dst_stride = 8192,
                      .src = device,
                      .src_stride = 9000,
                      .row_bytes = 8192,
                      .rows = 5'000'000};
  int64_t bytes = 0;
  const char* next_host = pool + 256;
  for (const RowsCopy& piece : CopyPieces(copy, true, blocks, 1 << 20)) {
    const auto* host = static_cast<const char*>(piece.dst);
    EXPECT_EQ(host, next_host);
    const int64_t extent = (piece.rows - 1) * 8192 + piece.row_bytes;
    EXPECT_EQ((host - pool) >> 30, (host + extent - 1 - pool) >> 30) << "crosses a block";
    const int64_t from = host - (pool + 256);
    EXPECT_EQ(static_cast<const char*>(piece.src), device + from / 8192 * 9000 + from % 8192);
    next_host = host + extent;
    bytes += piece.bytes();
  }
  EXPECT_EQ(bytes, copy.bytes());
}

TEST(CudaDevice, RefusesWithNumbers) {
  Runtime::Options small;
  small.total_bytes = 1 << 20;
  small.lockable_bytes = 10 << 12;
  const auto create = [&](const CudaDevice::Options& options) {
    return Create(options, std::make_shared<Runtime>(small)).status();
  };
  const absl::Status memory = create({.arena_bytes = 2 << 20});
  EXPECT_EQ(memory.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(
      Message(memory),
      "GPU 3 (Fake) cannot give an arena of 2.0 MiB (2097152 bytes): 1.0 MiB of its 1.0 MiB are "
      "free (out of memory); end what else runs there, or lower the memory per rank");
  const absl::Status pinned = create({.host_bytes = 16 << 12, .pinned_block_bytes = 1 << 12});
  EXPECT_EQ(pinned.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(pinned),
              AllOf(HasSubstr("pinning 64.0 KiB of host memory stopped after 40.0 KiB"),
                    HasSubstr("no more memory can be locked")));
  EXPECT_EQ(create({.arena_bytes = -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.host_bytes = -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.num_threads = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.cpus = {100'000}}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(CudaDevice, AStreamOfAnotherKindIsACheckFailure) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = *Create({}, std::make_shared<Runtime>());
  const auto host = device->CreateHostStream("host7");
  EXPECT_DEATH(CudaStream::Of(*host), "stream host7 is none of a CUDA device");
}

TEST(NumaNode, IsReadFromSysfs) {
  const auto root = std::filesystem::path(::testing::TempDir()) / "numa_sysfs";
  const auto folder = root / "bus/pci/devices/0000:1b:00.0";
  std::filesystem::create_directories(folder);
  EXPECT_EQ(NumaNodeOfPci("0000:1B:00.0", root), std::nullopt);
  std::ofstream(folder / "numa_node") << "1\n";
  EXPECT_EQ(NumaNodeOfPci("0000:1B:00.0", root), 1);
  std::ofstream(folder / "numa_node") << "-1\n";
  EXPECT_EQ(NumaNodeOfPci("0000:1B:00.0", root), std::nullopt);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace upipe::kernels
