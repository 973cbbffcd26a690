// What every Device, Stream, Event and Allocator promises, for the host device with one and several
// threads, the test device, the CUDA device over a runtime on threads, and the dry device (all but
// the parts that need execution).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/dry/dry_device.h"
#include "kernels/host/host_device.h"
#include "tests/contract/kernels/fill_ops.h"
#include "tests/support/cuda_runtime/fake_runtime.h"

namespace upipe::kernels {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kArenaBytes = 1 << 20;
constexpr int64_t kHostBytes = 1 << 19;

struct DeviceCase {
  const char* name;
  bool executes;
  std::function<std::unique_ptr<Device>()> create;
};

std::unique_ptr<Device> CreateHost(HostDevice::Options options) {
  if (options.arena_bytes == 0) options.arena_bytes = kArenaBytes;
  options.host_bytes = kHostBytes;
  auto device = HostDevice::Create(options, std::make_unique<FillOpTable>());
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

// Its pinned pool is cut into blocks of 64 KiB.
std::unique_ptr<Device> CreateCuda(std::optional<StreamDelay> runtime_delay,
                                   int64_t arena_bytes = kArenaBytes,
                                   std::optional<StreamDelay> delay = {}) {
  testing::FakeCudaRuntime::Options runtime;
  runtime.delay = runtime_delay;
  auto device =
      CudaDevice::Create({.arena_bytes = arena_bytes,
                          .host_bytes = kHostBytes,
                          .num_threads = 2,
                          .pinned_block_bytes = 1 << 16,
                          .delay = delay,
                          .poison_freed = delay.has_value()},
                         std::make_shared<testing::FakeCudaRuntime>(runtime),
                         std::make_unique<FillOpTable>(), std::make_unique<FillOpTable>());
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

HostDevice::Options TestDevice(uint64_t seed, int64_t arena_bytes = kArenaBytes) {
  return {.name = "cpu",
          .arena_bytes = arena_bytes,
          .num_threads = 2,
          .delay = StreamDelay{.seed = seed},
          .poison_freed = true};
}

std::vector<DeviceCase> Cases() {
  return {{"host_1_thread", true, [] { return CreateHost({.num_threads = 1}); }},
          {"host_3_threads", true, [] { return CreateHost({.prefault = true, .num_threads = 3}); }},
          {"test_device", true, [] { return CreateHost(TestDevice(1)); }},
          {"cuda", true, [] { return CreateCuda(std::nullopt); }},
          {"cuda_delayed", true, [] { return CreateCuda(StreamDelay{.seed = 5}); }},
          {"cuda_test_device", true,
           [] { return CreateCuda(std::nullopt, kArenaBytes, StreamDelay{.seed = 6}); }},
          {"dry", false, []() -> std::unique_ptr<Device> {
             return std::make_unique<DryDevice>("cpu", std::make_unique<FillOpTable>());
           }}};
}

class DeviceContract : public ::testing::TestWithParam<DeviceCase> {
 protected:
  bool executes() const { return GetParam().executes; }
  Buffer Take(int64_t bytes, Stream& stream, MemoryTag tag = MemoryTag::kWorkspace) {
    auto buffer = device_->allocator().Allocate(tag, bytes, stream);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  Buffer TakeHost(int64_t bytes, Stream& stream, MemoryTag tag = MemoryTag::kWorkspace) {
    auto buffer = device_->host_allocator().Allocate(tag, bytes, stream);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }

  const std::unique_ptr<Device> device_ = GetParam().create();
};

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

absl::Status Ok(ExecContext&) { return absl::OkStatus(); }

TEST_P(DeviceContract, NamesItselfAndItsStreams) {
  const bool cuda = std::string(GetParam().name).starts_with("cuda");
  EXPECT_EQ(device_->name(), !executes() ? "dry(cpu)" : cuda ? "cuda" : "cpu");
  EXPECT_EQ(device_->CreateStream("compute")->name(), "compute");
}

TEST_P(DeviceContract, APointOfAnIdleStreamIsReached) {
  const auto stream = device_->CreateStream("idle");
  const Event event = stream->Record();
  EXPECT_TRUE(event.Done());
  EXPECT_TRUE(event.Synchronize().ok());
  EXPECT_TRUE(stream->Synchronize().ok());
  EXPECT_TRUE(Event().Done());
  stream->Wait(Event());
  stream->Wait(event);
  EXPECT_TRUE(stream->Synchronize().ok());
}

TEST_P(DeviceContract, TasksRunInOrderAndEventsFollowThem) {
  std::vector<int> seen;
  const auto stream = device_->CreateStream("order");
  for (int i = 0; i < 100; ++i) {
    stream->Submit([&seen, i](ExecContext&) {
      seen.push_back(i);
      return absl::OkStatus();
    });
  }
  const Event event = stream->Record();
  EXPECT_TRUE(event.Synchronize().ok());
  EXPECT_TRUE(event.Done());
  EXPECT_EQ(seen.size(), executes() ? 100u : 0u);
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], static_cast<int>(i));
}

TEST_P(DeviceContract, AnEventIsNotDoneBeforeItsPoint) {
  if (!executes()) GTEST_SKIP() << "dry streams execute nothing";
  std::promise<void> gate;
  const auto stream = device_->CreateStream("gated");
  stream->Submit([&gate](ExecContext&) {
    gate.get_future().wait();
    return absl::OkStatus();
  });
  const Event event = stream->Record();
  EXPECT_FALSE(event.Done());
  gate.set_value();
  EXPECT_TRUE(event.Synchronize().ok());
  EXPECT_TRUE(event.Done());
}

TEST_P(DeviceContract, StampsTellWhenTheStreamGotThere) {
  const int64_t start = SteadyNanos();
  std::promise<void> go;
  int64_t begin = 0, end = 0;
  TimeStamp before(0), after(0);
  const auto stream = device_->CreateStream("stamped");
  stream->Stamp(&before);
  stream->Submit([&](ExecContext&) {
    begin = SteadyNanos();
    go.get_future().wait();
    end = SteadyNanos();
    return absl::OkStatus();
  });
  stream->Stamp(&after);
  EXPECT_EQ(after.load(), 0);
  go.set_value();
  ASSERT_TRUE(stream->Synchronize().ok());
  if (!executes()) {
    EXPECT_EQ(before.load(), 0);
    EXPECT_EQ(after.load(), 0);
    return;
  }
  EXPECT_GE(after - before, end - begin);
  // A device's own clock is set by the host's, with an error far below this.
  constexpr int64_t kSecond = 1'000'000'000;
  EXPECT_GT(before.load(), start - kSecond);
  EXPECT_LT(after.load(), SteadyNanos() + kSecond);
}

TEST_P(DeviceContract, WaitOrdersOneStreamAfterAPointOfAnother) {
  if (!executes()) GTEST_SKIP() << "dry streams execute nothing";
  int value = 0, seen = -1;
  std::promise<void> gate;
  const auto producer = device_->CreateStream("producer");
  const auto consumer = device_->CreateStream("consumer");
  producer->Submit([&](ExecContext&) {
    gate.get_future().wait();
    value = 7;
    return absl::OkStatus();
  });
  consumer->Wait(producer->Record());
  consumer->Submit([&](ExecContext&) {
    seen = value;
    return absl::OkStatus();
  });
  const Event event = consumer->Record();
  EXPECT_FALSE(event.Done());
  gate.set_value();
  EXPECT_TRUE(event.Synchronize().ok());
  EXPECT_EQ(seen, 7);
}

TEST_P(DeviceContract, AFailedTaskPutsItsStreamInError) {
  if (!executes()) GTEST_SKIP() << "dry streams execute nothing";
  bool ran_after = false;
  const auto stream = device_->CreateStream("failing");
  stream->Submit(Ok);
  const Event before = stream->Record();
  stream->Submit([](ExecContext&) { return absl::OutOfRangeError("token 99"); });
  const Event after = stream->Record();
  stream->Submit([&ran_after](ExecContext&) {
    ran_after = true;
    return absl::InternalError("second error");
  });
  EXPECT_EQ(stream->Synchronize().message(), "token 99");
  EXPECT_TRUE(before.Synchronize().ok());
  EXPECT_EQ(after.Synchronize().code(), absl::StatusCode::kOutOfRange);
  EXPECT_FALSE(ran_after);
  // A stream that waits for the failed one must not compute with what it did not write.
  bool ran_waiter = false;
  const auto waiter = device_->CreateStream("waiter");
  waiter->Wait(after);
  waiter->Submit([&ran_waiter](ExecContext&) {
    ran_waiter = true;
    return absl::OkStatus();
  });
  EXPECT_EQ(waiter->Synchronize().message(), "token 99");
  EXPECT_FALSE(ran_waiter);
}

TEST_P(DeviceContract, EventsOutliveTheirStreamWhichDrains) {
  std::atomic<int> ran{0};
  auto stream = device_->CreateStream("short-lived");
  for (int i = 0; i < 50; ++i) {
    stream->Submit([&ran](ExecContext&) {
      ++ran;
      return absl::OkStatus();
    });
  }
  const Event event = stream->Record();
  stream.reset();
  EXPECT_EQ(ran, executes() ? 50 : 0);
  EXPECT_TRUE(event.Done());
  EXPECT_TRUE(event.Synchronize().ok());
}

TEST_P(DeviceContract, CopiesAreStreamOrdered) {
  const auto stream = device_->CreateStream("copy");
  const Buffer buffer = Take(64, *stream);
  char from[64], to[64];
  std::memset(from, 'a', sizeof(from));
  std::memset(to, 'z', sizeof(to));
  device_->CopyFromHost(buffer.data(), from, 64, *stream);
  device_->CopyToHost(to, buffer.data(), 64, *stream);
  device_->CopyToHost(to, buffer.data(), 0, *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(std::string(to, 64), std::string(64, executes() ? 'a' : 'z'));
}

TEST_P(DeviceContract, CopiesOfRowsLeaveTheGapsAlone) {
  const auto stream = device_->CreateStream("copy");
  const Buffer buffer = Take(64, *stream);
  const Buffer host = TakeHost(64, *stream);
  const std::string from = "abcdefghijklmnopqrstuvwxyz";
  const std::string dashes(64, '-'), dots(64, '.');
  std::string to(64, '?');
  device_->CopyFromHost(buffer.data(), dashes.data(), 64, *stream);
  // Rows of 3 bytes, 5 apart, come to lie 4 apart in device memory, then 7 apart in the pool.
  device_->CopyRowsFromHost({.dst = buffer.data(),
                             .dst_stride = 4,
                             .src = from.data(),
                             .src_stride = 5,
                             .row_bytes = 3,
                             .rows = 4},
                            *stream);
  device_->CopyToHost(to.data(), buffer.data(), 64, *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  const std::string close = "abc-fgh-klm-pqr-------";
  EXPECT_EQ(to.substr(0, close.size()), executes() ? close : std::string(close.size(), '?'));
  if (executes()) std::memcpy(host.data(), dots.data(), 64);
  device_->CopyRowsToHost({.dst = host.data(),
                           .dst_stride = 7,
                           .src = buffer.data(),
                           .src_stride = 4,
                           .row_bytes = 3,
                           .rows = 4},
                          *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  if (!executes()) return;
  EXPECT_EQ(std::string(static_cast<char*>(host.data()), 28), "abc....fgh....klm....pqr....");
}

TEST_P(DeviceContract, RowsWithoutGapsAreOneCopyAndNoRowsNone) {
  const auto stream = device_->CreateStream("copy");
  const Buffer buffer = Take(64, *stream);
  std::string to(16, '?');
  device_->CopyFromHost(buffer.data(), "0123456789abcdef", 16, *stream);
  device_->CopyRowsToHost({.dst = to.data(),
                           .dst_stride = 4,
                           .src = buffer.data(),
                           .src_stride = 4,
                           .row_bytes = 4,
                           .rows = 3},
                          *stream);
  device_->CopyRowsToHost({.dst = to.data(), .src = buffer.data(), .row_bytes = 4, .rows = 0},
                          *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(to, executes() ? "0123456789ab????" : std::string(16, '?'));
}

TEST_P(DeviceContract, OverlappingRowsAreACheckFailure) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto stream = device_->CreateStream("copy");
  const Buffer buffer = Take(64, *stream);
  char host[64] = {};
  EXPECT_DEATH(device_->CopyRowsToHost({.dst = host,
                                        .dst_stride = 8,
                                        .src = buffer.data(),
                                        .src_stride = 4,
                                        .row_bytes = 5,
                                        .rows = 2},
                                       *stream),
               "rows of 5 bytes, 4 apart to 8 apart");
}

TEST_P(DeviceContract, HostMemoryIsAPoolOfItsOwn) {
  const auto stream = device_->CreateStream("copy");
  const Buffer device = Take(1000, *stream, MemoryTag::kResidual);
  const Buffer first = TakeHost(3000, *stream, MemoryTag::kResidual);
  const Buffer second = TakeHost(3000, *stream, MemoryTag::kAttnOut);
  const auto address = [](const Buffer& buffer) {
    return reinterpret_cast<uintptr_t>(buffer.data());
  };
  EXPECT_EQ(address(first) % Allocator::kAlignmentBytes, 0u);
  EXPECT_EQ(address(second) - address(first), 3072u);
  EXPECT_GE(std::max(address(first), address(device)) - std::min(address(first), address(device)),
            static_cast<uintptr_t>(std::min(kArenaBytes, kHostBytes)))
      << "the pools overlap";
  const MemoryStats on_device = device_->allocator().stats();
  const MemoryStats on_host = device_->host_allocator().stats();
  EXPECT_EQ(on_device.current_total_bytes, 1000);
  EXPECT_EQ(on_host.current_total_bytes, 6000);
  EXPECT_EQ(on_host.current_bytes[static_cast<int>(MemoryTag::kAttnOut)], 3000);
  EXPECT_EQ(on_host.attention_peak_bytes, 3000);
  EXPECT_EQ(on_host.arena_high_water_bytes, 6144);
}

TEST_P(DeviceContract, AFullHostPoolIsAnErrorOfItsOwnUnlessDry) {
  const auto stream = device_->CreateStream("copy");
  const auto buffer = device_->host_allocator().Allocate(MemoryTag::kMlp, kHostBytes + 1, *stream);
  ASSERT_EQ(buffer.ok(), !executes());
  if (!executes()) return;
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(buffer.status().message()), HasSubstr("host arena exhausted: mlp"));
}

TEST_P(DeviceContract, HostOpsRunOnHostStreamsOverHostMemory) {
  const auto copy = device_->CreateStream("copy");
  const auto host = device_->CreateHostStream("host");
  EXPECT_EQ(host->name(), "host");
  const Buffer data = TakeHost(400, *copy);
  const OpParams fill =
      FillParams{.dst = TensorView::Vector(data.data(), DType::kFloat32, 100), .value = 3.5};
  const int64_t scratch_bytes = device_->host_ops().WorkspaceBytes(fill);
  const Buffer scratch = TakeHost(scratch_bytes, *host);
  ASSERT_TRUE(device_->host_ops().Enqueue(fill, {scratch.data(), scratch_bytes}, *host).ok());
  copy->Wait(host->Record());
  const Buffer device = Take(400, *copy);
  device_->CopyFromHost(device.data(), data.data(), 400, *copy);
  std::vector<float> seen(100, -1.0f);
  device_->CopyToHost(seen.data(), device.data(), 400, *copy);
  ASSERT_TRUE(copy->Synchronize().ok());
  EXPECT_EQ(seen, std::vector<float>(100, executes() ? 3.5f : -1.0f));
}

TEST_P(DeviceContract, DeviceMemoryGivenAsHostMemoryFailsTheStream) {
  if (!executes()) GTEST_SKIP() << "dry streams execute nothing";
  const auto any = device_->CreateStream("any");
  const Buffer device = Take(512, *any);
  const Buffer other = Take(512, *any);
  const Buffer host = TakeHost(512, *any);
  char ordinary[512] = {};
  char* const last = static_cast<char*>(device.data()) - 1;
  const auto failure = [&](const std::function<void(Stream&)>& copy) {
    const auto stream = device_->CreateStream("copy");
    copy(*stream);
    return stream->Synchronize();
  };
  const auto to_host = [&](void* to, const void* from) {
    return failure([&](Stream& s) { device_->CopyToHost(to, from, 256, s); });
  };
  const auto from_host = [&](void* to, const void* from) {
    return failure([&](Stream& s) { device_->CopyFromHost(to, from, 256, s); });
  };
  EXPECT_TRUE(to_host(host.data(), device.data()).ok());
  EXPECT_TRUE(to_host(ordinary, device.data()).ok());
  EXPECT_TRUE(from_host(device.data(), host.data()).ok());
  for (const absl::Status& status :
       {to_host(other.data(), device.data()), from_host(device.data(), other.data()),
        to_host(last, other.data())}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("its host side lies in device memory"));
  }
  for (const absl::Status& status :
       {to_host(ordinary, host.data()), from_host(host.data(), ordinary),
        from_host(ordinary, host.data()), to_host(ordinary, last)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("lies outside device memory"));
  }
  // A row that reaches over the end is no device memory either.
  const Buffer all = Take(kArenaBytes - 1024, *any);
  const auto rows = failure([&](Stream& s) {
    device_->CopyRowsToHost({.dst = ordinary,
                             .dst_stride = 128,
                             .src = static_cast<char*>(all.data()) + all.size_bytes() - 256,
                             .src_stride = 256,
                             .row_bytes = 128,
                             .rows = 2},
                            s);
  });
  EXPECT_EQ(rows.code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(DeviceContract, OpsRunOnTheStream) {
  const auto stream = device_->CreateStream("compute");
  const Buffer data = Take(1000 * 4, *stream);
  const OpParams fill =
      FillParams{.dst = TensorView::Vector(data.data(), DType::kFloat32, 1000), .value = 2.5};
  const int64_t scratch_bytes = device_->ops().WorkspaceBytes(fill);
  EXPECT_EQ(scratch_bytes, FillBackend::kFillWorkspaceBytes);
  const Buffer scratch = Take(scratch_bytes, *stream);
  ASSERT_TRUE(device_->ops().Enqueue(fill, {scratch.data(), scratch_bytes}, *stream).ok());
  std::vector<float> host(1000, -1.0f);
  device_->CopyToHost(host.data(), data.data(), 4000, *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(host, std::vector<float>(1000, executes() ? 2.5f : -1.0f));
}

TEST_P(DeviceContract, OpsRefuseBadParamsAndSmallScratchInTheSameWords) {
  const auto stream = device_->CreateStream("compute");
  const Buffer data = Take(64, *stream);
  const auto view = TensorView::Vector(data.data(), DType::kFloat32, 16);
  absl::Status status = device_->ops().Enqueue(FillParams{.dst = {}}, {}, *stream);
  EXPECT_EQ(status.message(), "fill: dst has rank 0, must be 1 to 3");
  status = device_->ops().Enqueue(FillParams{.dst = view}, {data.data(), 95}, *stream);
  EXPECT_THAT(std::string(status.message()), HasSubstr("fill: workspace has 95 bytes, needs 96"));
  EXPECT_TRUE(stream->Synchronize().ok()) << "a refused op is not submitted";
}

TEST_P(DeviceContract, BuffersAreAlignedAndCountedByTag) {
  const auto stream = device_->CreateStream("compute");
  Buffer a = Take(1000, *stream, MemoryTag::kAttnQ);
  const Buffer b = Take(1, *stream, MemoryTag::kMlp);
  for (const Buffer* buffer : {&std::as_const(a), &b}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % Allocator::kAlignmentBytes, 0u);
  }
  EXPECT_EQ(static_cast<char*>(b.data()) - static_cast<char*>(a.data()), 1024);
  EXPECT_EQ(device_->allocator().stats().attention_peak_bytes, 1000);
  a.Free();
  EXPECT_EQ(device_->allocator().stats().current_total_bytes, 1);
}

TEST_P(DeviceContract, ABlockOfABusyStreamIsGivenAwayBehindAWait) {
  if (!executes()) GTEST_SKIP() << "dry streams execute nothing";
  std::promise<void> gate;
  std::string order;
  const auto first = device_->CreateStream("first");
  const auto second = device_->CreateStream("second");
  void* address = nullptr;
  {
    const Buffer buffer = Take(kArenaBytes, *first);
    address = buffer.data();
    first->Submit([&](ExecContext&) {
      gate.get_future().wait();
      order += "first ";
      return absl::OkStatus();
    });
  }
  const Buffer reused = Take(256, *second);
  EXPECT_EQ(reused.data(), address);
  second->Submit([&](ExecContext&) {
    order += "second";
    return absl::OkStatus();
  });
  const Event event = second->Record();
  EXPECT_FALSE(event.Done());
  gate.set_value();
  ASSERT_TRUE(event.Synchronize().ok());
  EXPECT_EQ(order, "first second");
}

TEST_P(DeviceContract, AFullArenaIsAnErrorUnlessDry) {
  const auto stream = device_->CreateStream("compute");
  const auto buffer = device_->allocator().Allocate(MemoryTag::kLogits, 2 * kArenaBytes, *stream);
  EXPECT_EQ(buffer.status().code(),
            executes() ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk);
}

TEST_P(DeviceContract, StatsMayBeReadWhileTheStepAllocates) {
  const auto stream = device_->CreateStream("compute");
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const MemoryStats stats = device_->allocator().stats();
      EXPECT_EQ(stats.current_total_bytes, stats.current_bytes[0]);
    }
  });
  for (int i = 0; i < 500; ++i) Take(100, *stream, MemoryTag::kWeights).Free();
  stop = true;
  reader.join();
}

// A seeded program over three streams and blocks that come and go: each op writes a block on some
// stream after an event of the block's last writer. Returns the final bytes and where they were.
struct Outcome {
  std::vector<std::vector<float>> values;
  std::vector<int64_t> offsets;
  MemoryStats stats;
};

class RandomProgram {
 public:
  RandomProgram(Device& device, uint32_t seed) : device_(device), random_(seed) {
    for (const char* name : {"compute", "comm", "copy"}) {
      streams_.push_back(device.CreateStream(name));
    }
    const auto first = device.allocator().Allocate(MemoryTag::kMlp, 256, *streams_[0]);
    base_ = static_cast<char*>(first->data());
  }

  Outcome Execute() {
    for (int step = 0; step < 300; ++step) {
      if (live_.size() < 4 || random_() % 3 == 0) {
        Create();
      } else if (random_() % 2 == 0) {
        Accumulate();
      } else {
        live_.erase(live_.begin() + random_() % live_.size());
      }
      if (live_.size() > 12) live_.erase(live_.begin());
    }
    std::vector<float> host;
    for (const Block& block : live_) {
      host.assign(kElements, 0.0f);
      device_.CopyToHost(host.data(), block.buffer.data(), kElements * 4, *block.stream);
      EXPECT_TRUE(block.stream->Synchronize().ok());
      outcome_.values.push_back(host);
    }
    live_.clear();
    outcome_.stats = device_.allocator().stats();
    for (const auto& stream : streams_) EXPECT_TRUE(stream->Synchronize().ok());
    return outcome_;
  }

 private:
  static constexpr int64_t kElements = 500;
  struct Block {
    Buffer buffer;
    Stream* stream;
  };

  TensorView View(const Block& block) const {
    return TensorView::Tensor3(block.buffer.data(), DType::kFloat32, {1, 1, kElements}, kElements,
                               kElements);
  }

  void Create() {
    Stream& stream = *streams_[random_() % 3];
    Block block{*device_.allocator().Allocate(MemoryTag::kAttnQ, kElements * 4, stream), &stream};
    const auto scratch = device_.allocator().Allocate(MemoryTag::kWorkspace, 96, stream);
    outcome_.offsets.push_back(static_cast<char*>(block.buffer.data()) - base_);
    const FillParams fill{.dst = View(block), .value = static_cast<double>(random_() % 1000)};
    EXPECT_TRUE(device_.ops().Enqueue(fill, {scratch->data(), 96}, stream).ok());
    live_.push_back(std::move(block));
  }

  // One block += another; the reader's stream is waited for before the source may be freed.
  void Accumulate() {
    const size_t to = random_() % live_.size();
    const size_t from = random_() % live_.size();
    if (to == from) return;
    Block& source = live_[from];
    Block& target = live_[to];
    target.stream->Wait(source.stream->Record());
    const StridedCopyParams add{.src = View(source), .dst = View(target), .accumulate = true};
    EXPECT_TRUE(device_.ops().Enqueue(add, {}, *target.stream).ok());
    source.stream->Wait(target.stream->Record());
  }

  Device& device_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Stream>> streams_;
  char* base_ = nullptr;
  std::vector<Block> live_;
  Outcome outcome_;
};

TEST(TestDevice, DelaysAndPoisonDoNotChangeABit) {
  // In the smaller arena streams must take each other's blocks.
  for (const int64_t arena_bytes : {kArenaBytes, kArenaBytes / 32}) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      const auto plain = CreateHost({.arena_bytes = arena_bytes, .num_threads = 2});
      const Outcome expected = RandomProgram(*plain, seed).Execute();
      ASSERT_FALSE(expected.values.empty());
      EXPECT_EQ(expected.stats.arena_high_water_bytes > kArenaBytes / 32,
                arena_bytes == kArenaBytes);
      for (uint64_t delay_seed = 1; delay_seed <= 2; ++delay_seed) {
        const auto test_device = CreateHost(TestDevice(delay_seed, arena_bytes));
        const Outcome outcome = RandomProgram(*test_device, seed).Execute();
        EXPECT_EQ(outcome.values, expected.values) << "seed " << seed << " " << delay_seed;
        EXPECT_EQ(outcome.offsets, expected.offsets);
      }
    }
  }
}

TEST(CudaDevice, PoisonsWhatIsFreed) {
  const auto device = CreateCuda(std::nullopt, kArenaBytes, StreamDelay{.seed = 1});
  const auto stream = device->CreateStream("compute");
  for (Allocator* allocator : {&device->allocator(), &device->host_allocator()}) {
    auto buffer = allocator->Allocate(MemoryTag::kWorkspace, 1000, *stream);
    ASSERT_TRUE(buffer.ok());
    const auto* bytes = static_cast<const unsigned char*>(buffer->data());
    EXPECT_TRUE(std::all_of(bytes, bytes + 1000, [](unsigned char byte) { return byte == 0; }));
    buffer->Free();
    ASSERT_TRUE(stream->Synchronize().ok());
    EXPECT_TRUE(std::all_of(bytes, bytes + 1000,
                            [](unsigned char byte) { return byte == Allocator::kPoisonByte; }));
  }
}

TEST(CudaDevice, GivesTheBytesAndAddressesOfTheHostDevice) {
  for (const int64_t arena_bytes : {kArenaBytes, kArenaBytes / 32}) {
    const auto host = CreateHost({.arena_bytes = arena_bytes, .num_threads = 2});
    const Outcome expected = RandomProgram(*host, 4).Execute();
    for (uint64_t delay_seed = 1; delay_seed <= 3; ++delay_seed) {
      const StreamDelay delay{.seed = delay_seed};
      for (const auto& cuda :
           {CreateCuda(delay, arena_bytes), CreateCuda(std::nullopt, arena_bytes, delay)}) {
        const Outcome outcome = RandomProgram(*cuda, 4).Execute();
        EXPECT_EQ(outcome.values, expected.values) << "seed " << delay_seed;
        EXPECT_EQ(outcome.offsets, expected.offsets);
      }
    }
  }
}

TEST(TestDevice, PoisonFillsFreedBlocksWithNaN) {
  const auto device = CreateHost(TestDevice(1));
  const auto stream = device->CreateStream("compute");
  void* address = nullptr;
  {
    const auto buffer = device->allocator().Allocate(MemoryTag::kMlp, 64, *stream);
    address = buffer->data();
  }
  float values[16] = {};
  device->CopyToHost(values, address, 64, *stream);
  ASSERT_TRUE(stream->Synchronize().ok());
  for (const float value : values) EXPECT_NE(value, value);
}

TEST(DryDevice, GetsTheAddressesAndPeaksOfTheHostDevice) {
  const auto host = CreateHost({.num_threads = 1});
  const Outcome real = RandomProgram(*host, 9).Execute();
  DryDevice dry("cpu", std::make_unique<FillOpTable>());
  const Outcome planned = RandomProgram(dry, 9).Execute();
  EXPECT_EQ(planned.offsets, real.offsets);
  EXPECT_EQ(planned.stats.peak_bytes, real.stats.peak_bytes);
  EXPECT_EQ(planned.stats.at_peak_bytes, real.stats.at_peak_bytes);
  EXPECT_EQ(planned.stats.arena_high_water_bytes, real.stats.arena_high_water_bytes);
}

TEST(DryDevice, CountsOpsAndCopies) {
  DryDevice device("cpu", std::make_unique<FillOpTable>());
  const auto stream = device.CreateStream("compute");
  const auto buffer = device.allocator().Allocate(MemoryTag::kMlp, int64_t{1} << 42, *stream);
  ASSERT_TRUE(buffer.ok()) << "a dry arena has no limit";
  const auto view = TensorView::Vector(buffer->data(), DType::kFloat32, 16);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(device.ops().Enqueue(FillParams{.dst = view}, {buffer->data(), 96}, *stream).ok());
  }
  auto half = view;
  half.dtype = DType::kBFloat16;
  ASSERT_TRUE(device.ops().Enqueue(FillParams{.dst = half}, {buffer->data(), 96}, *stream).ok());
  const auto cast =
      StridedCopyParams{.src = half.AsTensor3(), .dst = view.Rows(16, 16).AsTensor3()};
  ASSERT_TRUE(device.ops().Enqueue(cast, {}, *stream).ok());
  const auto out = TensorView::Vector(view.At(16), DType::kFloat64, 1);
  ASSERT_TRUE(device.ops().Enqueue(SumOfSquaresParams{.x = view, .out = out}, {}, *stream).ok());
  device.CopyToHost(nullptr, buffer->data(), 100, *stream);
  device.CopyFromHost(buffer->data(), nullptr, 30, *stream);
  device.CopyRowsFromHost({.dst = buffer->data(),
                           .dst_stride = 70,
                           .src_stride = 7,
                           .row_bytes = 7,
                           .rows = int64_t{1} << 33},
                          *stream);
  const DryCounts& counts = device.counts();
  EXPECT_EQ(counts.by_op().at("fill").calls, 4);
  EXPECT_EQ(counts.by_op().at("fill").cost.bytes_written, 3 * 64 + 32);
  EXPECT_EQ(counts.by_op().at("strided_copy").cost.bytes_read, 32);
  EXPECT_EQ(counts.by_op().at("strided_copy").cost.bytes_written, 64);
  EXPECT_EQ(counts.by_op().at("sum_of_squares").cost.flops, 32);
  EXPECT_EQ(counts.total().calls, 6);
  EXPECT_EQ(counts.total().cost.bytes_written, 3 * 64 + 32 + 64 + 8);
  EXPECT_EQ(counts.copies_to_host, 1);
  EXPECT_EQ(counts.bytes_to_host, 100);
  EXPECT_EQ(counts.copies_from_host, 2);
  EXPECT_EQ(counts.bytes_from_host, 30 + (int64_t{7} << 33));
  device.ResetCounts();
  EXPECT_EQ(device.counts().total().calls, 0);
}

TEST(HostStream, SubmitHoldsBackAFastProducer) {
  const auto device = CreateHost({.num_threads = 1});
  const auto stream = device->CreateStream("slow");
  constexpr int kTasks = 3 * static_cast<int>(HostStream::kMaxPending);
  std::atomic<int> submitted{0};
  int ran = 0, furthest_ahead = 0;
  for (int i = 0; i < kTasks; ++i) {
    stream->Submit([&, i](ExecContext&) {
      if (i == 0) {  // let the producer run as far as it may
        while (submitted < static_cast<int>(HostStream::kMaxPending)) std::this_thread::yield();
        for (int poll = 0; poll < 1000; ++poll) std::this_thread::yield();
      }
      furthest_ahead = std::max(furthest_ahead, submitted - i);
      ++ran;
      return absl::OkStatus();
    });
    ++submitted;
  }
  ASSERT_TRUE(stream->Synchronize().ok());
  EXPECT_EQ(ran, kTasks);
  // The running task and the pending ones.
  EXPECT_LE(furthest_ahead, static_cast<int>(HostStream::kMaxPending) + 1);
}

TEST(HostDevice, RefusesBadOptions) {
  const auto create = [](HostDevice::Options options) {
    return HostDevice::Create(options, std::make_unique<FillOpTable>()).status();
  };
  EXPECT_EQ(create({.num_threads = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.cpus = {100000}}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.arena_bytes = -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.host_bytes = -1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create({.arena_bytes = int64_t{1} << 60}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(create({.host_bytes = int64_t{1} << 60}).code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace upipe::kernels
