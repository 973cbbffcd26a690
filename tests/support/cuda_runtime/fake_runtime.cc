#include "tests/support/cuda_runtime/fake_runtime.h"

#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"
#include "common/status.h"
#include "kernels/api/device_fault.h"
#include "kernels/host/host_parallel_for.h"

namespace upipe::kernels::testing {
namespace {

struct FakeEvent {
  explicit FakeEvent(bool is_timed) : timed(is_timed) {}
  const bool timed;
  std::mutex mutex;
  Event point;
  // Where `point` was passed; kept until the stream has written it.
  std::shared_ptr<TimeStamp> passed;
};

// Whose host function this thread runs.
thread_local const FakeCudaRuntime* in_host_function_of = nullptr;

HostStream& Of(CudaStreamHandle stream) { return *reinterpret_cast<HostStream*>(stream); }

Event PointOf(CudaEventHandle handle) {
  auto* event = reinterpret_cast<FakeEvent*>(handle);
  std::lock_guard lock(event->mutex);
  return event->point;
}

// The block of `blocks` that holds [begin, begin + bytes), or null; check failure when only part of
// it lies in one.
const char* BlockOf(const std::map<const char*, int64_t>& blocks, const char* begin,
                    int64_t bytes) {
  auto after = blocks.upper_bound(begin + bytes - 1);
  if (after == blocks.begin()) return nullptr;
  const auto [base, size] = *std::prev(after);
  if (begin >= base && begin + bytes <= base + size) return base;
  UPIPE_CHECK(begin >= base + size) << bytes << " bytes lie in several blocks, or only partly";
  return nullptr;
}

}  // namespace

FakeCudaRuntime::FakeCudaRuntime(Options options)
    : options_(std::move(options)),
      parallel_(std::make_shared<HostParallelFor>(1, std::vector<int>())) {}

FakeCudaRuntime::~FakeCudaRuntime() {
  UPIPE_CHECK(live_ == 0) << live_ << " streams and events left";
  UPIPE_CHECK(device_.empty() && registered_.empty() && mapped_.empty())
      << device_.size() << " arenas, " << registered_.size() << " registered blocks and "
      << mapped_.size() << " mapped ones left";
}

void FakeCudaRuntime::BreakDevice(const std::string& message) {
  std::lock_guard lock(mutex_);
  fault_ = message;
  broken_ = true;
}

std::map<const char*, int64_t> FakeCudaRuntime::registered() const {
  std::lock_guard lock(mutex_);
  return registered_;
}

absl::Status FakeCudaRuntime::Status() const {
  UPIPE_CHECK(in_host_function_of == nullptr) << "a host function calls CUDA";
  if (!broken_) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  return DeviceFault(fault_);
}

absl::StatusOr<CudaDeviceFacts> FakeCudaRuntime::Describe() {
  UPIPE_RETURN_IF_ERROR(Status());
  return CudaDeviceFacts{.name = "Fake",
                         .ordinal = 3,
                         .pci_address = "ffff:ff:ff.7",
                         .multiprocessors = 132,
                         .total_bytes = options_.total_bytes,
                         .free_bytes = options_.total_bytes,
                         .row_stride_bytes_max = 1 << 16};
}

absl::StatusOr<void*> FakeCudaRuntime::AllocateDevice(int64_t bytes) {
  UPIPE_RETURN_IF_ERROR(Status());
  if (bytes > options_.total_bytes) return absl::ResourceExhaustedError("out of memory");
  void* memory = std::aligned_alloc(256, static_cast<size_t>(RoundUp(bytes, 256)));
  std::lock_guard lock(mutex_);
  device_[static_cast<char*>(memory)] = bytes;
  return memory;
}

void FakeCudaRuntime::FreeDevice(void* memory) {
  std::lock_guard lock(mutex_);
  UPIPE_CHECK(device_.erase(static_cast<char*>(memory)) == 1) << memory << " is no device memory";
  std::free(memory);
}

absl::Status FakeCudaRuntime::RegisterHost(void* begin, int64_t bytes) {
  UPIPE_RETURN_IF_ERROR(Status());
  std::lock_guard lock(mutex_);
  int64_t locked = bytes;
  for (const auto& [base, size] : registered_) locked += size;
  if (locked > options_.lockable_bytes) {
    return absl::ResourceExhaustedError("no more memory can be locked");
  }
  registered_[static_cast<char*>(begin)] = bytes;
  return absl::OkStatus();
}

void FakeCudaRuntime::UnregisterHost(void* begin) {
  std::lock_guard lock(mutex_);
  UPIPE_CHECK(registered_.erase(static_cast<char*>(begin)) == 1) << begin << " is not registered";
}

absl::StatusOr<void*> FakeCudaRuntime::AllocateMapped(int64_t bytes) {
  UPIPE_RETURN_IF_ERROR(Status());
  void* memory = std::calloc(1, static_cast<size_t>(bytes));
  std::lock_guard lock(mutex_);
  mapped_[memory] = bytes;
  return memory;
}

void FakeCudaRuntime::FreeMapped(void* memory) {
  std::lock_guard lock(mutex_);
  UPIPE_CHECK(mapped_.erase(memory) == 1) << memory << " is not mapped";
  std::free(memory);
}

absl::StatusOr<CudaStreamHandle> FakeCudaRuntime::CreateStream() {
  UPIPE_RETURN_IF_ERROR(Status());
  ++live_;
  return reinterpret_cast<CudaStreamHandle>(new HostStream("fake", parallel_, options_.delay, {}));
}

void FakeCudaRuntime::DestroyStream(CudaStreamHandle stream) {
  delete &Of(stream);
  --live_;
}

absl::Status FakeCudaRuntime::SynchronizeStream(CudaStreamHandle stream) {
  UPIPE_CHECK_OK(Of(stream).Synchronize());
  return Status();
}

absl::StatusOr<CudaEventHandle> FakeCudaRuntime::CreateEvent() {
  UPIPE_RETURN_IF_ERROR(Status());
  ++live_;
  ++events_made_;
  return reinterpret_cast<CudaEventHandle>(new FakeEvent(/*is_timed=*/false));
}

absl::StatusOr<CudaEventHandle> FakeCudaRuntime::CreateTimedEvent() {
  UPIPE_RETURN_IF_ERROR(Status());
  ++live_;
  return reinterpret_cast<CudaEventHandle>(new FakeEvent(/*is_timed=*/true));
}

void FakeCudaRuntime::DestroyEvent(CudaEventHandle event) {
  delete reinterpret_cast<FakeEvent*>(event);
  --live_;
}

absl::Status FakeCudaRuntime::RecordEvent(CudaEventHandle handle, CudaStreamHandle stream) {
  UPIPE_RETURN_IF_ERROR(Status());
  auto* event = reinterpret_cast<FakeEvent*>(handle);
  std::lock_guard lock(event->mutex);
  if (event->timed) {
    event->passed = std::make_shared<TimeStamp>(0);
    Of(stream).Submit([passed = event->passed](ExecContext&) {
      passed->store(SteadyNanos());
      return absl::OkStatus();
    });
  }
  event->point = Of(stream).Record();
  return absl::OkStatus();
}

absl::StatusOr<bool> FakeCudaRuntime::EventDone(CudaEventHandle event) {
  UPIPE_RETURN_IF_ERROR(Status());
  return PointOf(event).Done();
}

absl::Status FakeCudaRuntime::SynchronizeEvent(CudaEventHandle event) {
  UPIPE_RETURN_IF_ERROR(Status());
  UPIPE_CHECK_OK(PointOf(event).Synchronize());
  return Status();
}

absl::StatusOr<int64_t> FakeCudaRuntime::NanosBetween(CudaEventHandle begin, CudaEventHandle end) {
  UPIPE_RETURN_IF_ERROR(Status());
  const auto passed = [](CudaEventHandle handle) {
    auto* event = reinterpret_cast<FakeEvent*>(handle);
    std::lock_guard lock(event->mutex);
    UPIPE_CHECK(event->timed) << "an event without a time is asked for it";
    return event->passed == nullptr ? 0 : event->passed->load();
  };
  const int64_t from = passed(begin), to = passed(end);
  if (from == 0 || to == 0) return absl::InternalError("the event was not passed");
  return to - from;
}

absl::Status FakeCudaRuntime::WaitEvent(CudaStreamHandle stream, CudaEventHandle event) {
  UPIPE_RETURN_IF_ERROR(Status());
  Of(stream).Wait(PointOf(event));
  return absl::OkStatus();
}

absl::Status FakeCudaRuntime::WaitWord(CudaStreamHandle stream, uint32_t* word, uint32_t value) {
  UPIPE_RETURN_IF_ERROR(Status());
  {
    std::lock_guard lock(mutex_);
    const auto after = mapped_.upper_bound(word);
    UPIPE_CHECK(after != mapped_.begin()) << "the word is not mapped memory";
    const auto [base, bytes] = *std::prev(after);
    UPIPE_CHECK(reinterpret_cast<char*>(word) < static_cast<char*>(base) + bytes);
  }
  Of(stream).Submit([this, word, value](ExecContext&) {
    const auto reached = [&] {
      return static_cast<int32_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0;
    };
    while (!reached() && !broken_) std::this_thread::yield();
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status FakeCudaRuntime::CheckRegistered(const RowsCopy& copy) const {
  const auto extent = [&](int64_t stride) { return (copy.rows - 1) * stride + copy.row_bytes; };
  std::lock_guard lock(mutex_);
  const auto* dst = static_cast<const char*>(copy.dst);
  const auto* src = static_cast<const char*>(copy.src);
  BlockOf(registered_, dst, extent(copy.dst_stride));
  BlockOf(registered_, src, extent(copy.src_stride));
  const bool to_host = BlockOf(device_, src, extent(copy.src_stride)) != nullptr;
  const bool from_host = BlockOf(device_, dst, extent(copy.dst_stride)) != nullptr;
  if (to_host == from_host) return absl::InternalError("not between device and host");
  return absl::OkStatus();
}

absl::Status FakeCudaRuntime::CopyRows(const RowsCopy& copy, CudaStreamHandle stream) {
  UPIPE_RETURN_IF_ERROR(Status());
  UPIPE_RETURN_IF_ERROR(CheckRegistered(copy));
  ++copies_;
  Of(stream).Submit([copy](ExecContext&) {
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(static_cast<char*>(copy.dst) + row * copy.dst_stride,
                  static_cast<const char*>(copy.src) + row * copy.src_stride,
                  static_cast<size_t>(copy.row_bytes));
    }
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status FakeCudaRuntime::FillBytes(void* memory, unsigned char byte, int64_t bytes,
                                        CudaStreamHandle stream) {
  UPIPE_RETURN_IF_ERROR(Status());
  Of(stream).Submit([=](ExecContext&) {
    std::memset(memory, byte, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

absl::Status FakeCudaRuntime::CallHost(CudaStreamHandle stream, void (*function)(void*),
                                       void* argument) {
  UPIPE_RETURN_IF_ERROR(Status());
  Of(stream).Submit([this, function, argument](ExecContext&) {
    if (broken_) return absl::OkStatus();
    in_host_function_of = this;
    function(argument);
    in_host_function_of = nullptr;
    return absl::OkStatus();
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::testing
