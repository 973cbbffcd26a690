#include "kernels/cuda/cuda_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "common/units.h"
#include "kernels/cuda/copy_pieces.h"
#include "kernels/cuda/numa_node.h"
#include "kernels/host/thread_placement.h"

namespace upipe::kernels {
namespace {

using Poison = decltype(Allocator::Options::poison);

Poison PoisonWith(CudaRuntime& runtime) {
  return [&runtime](void* block, int64_t bytes, Stream& stream) {
    CudaStream::Of(stream).Issue("poison", [&](CudaStreamHandle handle) {
      return runtime.FillBytes(block, Allocator::kPoisonByte, bytes, handle);
    });
  };
}

}  // namespace

// The device's memory of this rank.
class CudaDevice::Arena {
 public:
  static absl::StatusOr<std::unique_ptr<Arena>> Take(int64_t bytes, const CudaDeviceFacts& facts,
                                                     std::shared_ptr<CudaRuntime> runtime) {
    if (bytes == 0) return std::make_unique<Arena>(nullptr, 0, std::move(runtime));
    absl::StatusOr<void*> base = runtime->AllocateDevice(bytes);
    if (absl::IsResourceExhausted(base.status())) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "GPU ", facts.ordinal, " (", facts.name, ") cannot give an arena of ", FormatBytes(bytes),
          " (", bytes, " bytes): ", FormatBytes(facts.free_bytes), " of its ",
          FormatBytes(facts.total_bytes), " are free (", base.status().message(),
          "); end what else runs there, or lower the memory per rank"));
    }
    UPIPE_RETURN_IF_ERROR(base.status());
    return std::make_unique<Arena>(*base, bytes, std::move(runtime));
  }
  Arena(void* base, int64_t bytes, std::shared_ptr<CudaRuntime> runtime)
      : base_(base), bytes_(bytes), runtime_(std::move(runtime)) {}
  ~Arena() {
    if (base_ != nullptr) runtime_->FreeDevice(base_);
  }

  void* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  MemoryRange range() const { return {base_, bytes_}; }

 private:
  void* const base_;
  const int64_t bytes_;
  const std::shared_ptr<CudaRuntime> runtime_;
};

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(const Options& options,
                                                               std::shared_ptr<CudaRuntime> runtime,
                                                               std::unique_ptr<OpTable> ops,
                                                               std::unique_ptr<OpTable> host_ops) {
  if (options.num_threads < 1 || options.num_threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda device: num_threads = ", options.num_threads, ", must be 1 to 1024"));
  }
  if (options.arena_bytes < 0 || options.host_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("cuda device: arenas of ", options.arena_bytes,
                                                   " and ", options.host_bytes, " bytes"));
  }
  UPIPE_RETURN_IF_ERROR(CheckCpus(options.cpus));
  UPIPE_ASSIGN_OR_RETURN(const CudaDeviceFacts facts, runtime->Describe());
  UPIPE_ASSIGN_OR_RETURN(auto arena, Arena::Take(options.arena_bytes, facts, runtime));
  UPIPE_ASSIGN_OR_RETURN(auto pool,
                         PinnedPool::Create({.bytes = options.host_bytes,
                                             .numa_node = NumaNodeOfPci(facts.pci_address),
                                             .block_bytes = options.pinned_block_bytes},
                                            runtime));
  return std::unique_ptr<CudaDevice>(new CudaDevice(options, facts, std::move(runtime),
                                                    std::move(arena), std::move(pool),
                                                    std::move(ops), std::move(host_ops)));
}

CudaDevice::CudaDevice(const Options& options, const CudaDeviceFacts& facts,
                       std::shared_ptr<CudaRuntime> runtime, std::unique_ptr<Arena> arena,
                       std::unique_ptr<PinnedPool> pool, std::unique_ptr<OpTable> ops,
                       std::unique_ptr<OpTable> host_ops)
    : options_(options),
      facts_(facts),
      runtime_(std::move(runtime)),
      arena_(std::move(arena)),
      pool_(std::move(pool)),
      ops_(std::move(ops)),
      host_ops_(std::move(host_ops)),
      parallel_(std::make_shared<HostParallelFor>(options.num_threads, options.cpus)),
      allocator_({.base = arena_->base(),
                  .arena_bytes = arena_->bytes(),
                  .poison = options.poison_freed ? PoisonWith(*runtime_) : nullptr}),
      host_allocator_({.name = "host",
                       .base = pool_->arena().base(),
                       .arena_bytes = pool_->arena().bytes(),
                       .poison = options.poison_freed ? Poison(Allocator::PoisonOnHost) : nullptr}),
      shared_(std::make_shared<const CudaStreamShared>(
          CudaStreamShared{.runtime = runtime_,
                           .events = std::make_shared<CudaEventPool>(runtime_),
                           .clock = std::make_shared<CudaClock>(runtime_),
                           .parallel = std::make_shared<HostParallelFor>(1, std::vector<int>()),
                           .device = absl::StrCat("GPU ", facts.ordinal, " (", facts.name, ")"),
                           .moment = [this] { return allocator_.moment(); },
                           .delay = options.delay})) {}

CudaDevice::~CudaDevice() {
  UPIPE_CHECK(parallel_.use_count() == 1)
      << parallel_.use_count() - 1 << " host streams outlive device cuda";
}

std::string CudaDevice::hardware() const {
  const std::string libraries = ops_->libraries();
  return libraries.empty() ? facts_.name : absl::StrCat(facts_.name, ", ", libraries);
}

std::unique_ptr<Stream> CudaDevice::CreateStream(std::string name) {
  return std::make_unique<CudaStream>(std::move(name), shared_);
}

std::unique_ptr<Stream> CudaDevice::CreateHostStream(std::string name) {
  return std::make_unique<HostStream>(std::move(name), parallel_, options_.delay, options_.cpus);
}

void CudaDevice::CopyRowsToHost(const RowsCopy& copy, Stream& stream) {
  Copy(copy, /*to_host=*/true, stream);
}

void CudaDevice::CopyRowsFromHost(const RowsCopy& copy, Stream& stream) {
  Copy(copy, /*to_host=*/false, stream);
}

void CudaDevice::Copy(const RowsCopy& copy, bool to_host, Stream& stream) {
  CheckRows(copy);
  CudaStream& cuda = CudaStream::Of(stream);
  if (copy.bytes() == 0) return;
  const auto extent = [&](int64_t stride) { return (copy.rows - 1) * stride + copy.row_bytes; };
  const int64_t dst_bytes = extent(copy.dst_stride), src_bytes = extent(copy.src_stride);
  const void* device = to_host ? copy.src : copy.dst;
  const void* host = to_host ? copy.dst : copy.src;
  const int64_t host_bytes = to_host ? dst_bytes : src_bytes;
  const bool host_in_device = arena_->range().Overlaps(host, host_bytes);
  if (host_in_device || !arena_->range().Contains(device, to_host ? src_bytes : dst_bytes)) {
    cuda.Fail(absl::InvalidArgumentError(
        absl::StrCat("copy of ", copy.rows, " rows of ", copy.row_bytes, " bytes: ",
                     host_in_device ? "its host side lies in device memory"
                                    : "its device side lies outside device memory",
                     "; take host memory from the host allocator")));
    return;
  }
  const bool pinned = pool_->arena().range().Contains(host, host_bytes);
  cuda.Issue(to_host ? "copy to host" : "copy from host", [&](CudaStreamHandle handle) {
    for (const RowsCopy& piece : CopyPieces(copy, to_host, pinned ? pool_->blocks() : HostBlocks{},
                                            facts_.row_stride_bytes_max)) {
      UPIPE_RETURN_IF_ERROR(runtime_->CopyRows(piece, handle));
    }
    return absl::OkStatus();
  });
}

}  // namespace upipe::kernels
