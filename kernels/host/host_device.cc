#include "kernels/host/host_device.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/host/thread_placement.h"

namespace upipe::kernels {
namespace {

// Bytes from the first of the first row to the last of the last.
int64_t Extent(const RowsCopy& copy, int64_t stride) {
  return (copy.rows - 1) * stride + copy.row_bytes;
}

absl::Status CopyRows(const RowsCopy& copy) {
  if (copy.rows == 1 || (copy.dst_stride == copy.row_bytes && copy.src_stride == copy.row_bytes)) {
    std::memcpy(copy.dst, copy.src, static_cast<size_t>(copy.bytes()));
    return absl::OkStatus();
  }
  for (int64_t row = 0; row < copy.rows; ++row) {
    std::memcpy(static_cast<char*>(copy.dst) + row * copy.dst_stride,
                static_cast<const char*>(copy.src) + row * copy.src_stride,
                static_cast<size_t>(copy.row_bytes));
  }
  return absl::OkStatus();
}

// One side of a copy.
struct Side {
  const void* begin;
  int64_t bytes;
};

void SubmitCopy(const RowsCopy& copy, const Side& device, const Side& host,
                const MemoryRange& arena, Stream& stream) {
  if (arena.Contains(device.begin, device.bytes) && !arena.Overlaps(host.begin, host.bytes)) {
    stream.Submit([copy](ExecContext&) { return CopyRows(copy); });
    return;
  }
  absl::Status refusal = absl::InvalidArgumentError(absl::StrCat(
      "copy of ", copy.rows, " rows of ", copy.row_bytes, " bytes: ",
      arena.Overlaps(host.begin, host.bytes) ? "its host side lies in device memory"
                                             : "its device side lies outside device memory",
      "; take host memory from the host allocator"));
  stream.Submit([refusal = std::move(refusal)](ExecContext&) { return refusal; });
}

decltype(Allocator::Options::poison) PoisonOf(bool poison_freed) {
  if (!poison_freed) return nullptr;
  return Allocator::PoisonOnHost;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostDevice>> HostDevice::Create(const Options& options,
                                                               std::unique_ptr<OpTable> ops,
                                                               std::unique_ptr<OpTable> host_ops) {
  if (options.num_threads < 1 || options.num_threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.name, " device: num_threads = ", options.num_threads, ", must be 1 to 1024"));
  }
  UPIPE_RETURN_IF_ERROR(CheckCpus(options.cpus));
  UPIPE_ASSIGN_OR_RETURN(auto arena, HostArena::Map(options.arena_bytes, options.prefault));
  UPIPE_ASSIGN_OR_RETURN(auto host_arena, HostArena::Map(options.host_bytes, options.prefault));
  return std::unique_ptr<HostDevice>(new HostDevice(options, std::move(ops), std::move(host_ops),
                                                    std::move(arena), std::move(host_arena)));
}

HostDevice::HostDevice(const Options& options, std::unique_ptr<OpTable> ops,
                       std::unique_ptr<OpTable> host_ops, std::unique_ptr<HostArena> arena,
                       std::unique_ptr<HostArena> host_arena)
    : options_(options),
      ops_(std::move(ops)),
      host_ops_(std::move(host_ops)),
      arena_(std::move(arena)),
      host_arena_(std::move(host_arena)),
      parallel_(std::make_shared<HostParallelFor>(options.num_threads, options.cpus)),
      allocator_({.base = arena_->base(),
                  .arena_bytes = arena_->bytes(),
                  .poison = PoisonOf(options.poison_freed)}),
      host_allocator_({.name = "host",
                       .base = host_arena_->base(),
                       .arena_bytes = host_arena_->bytes(),
                       .poison = PoisonOf(options.poison_freed)}) {}

HostDevice::~HostDevice() {
  UPIPE_CHECK(parallel_.use_count() == 1)
      << parallel_.use_count() - 1 << " streams outlive device " << options_.name;
}

std::unique_ptr<Stream> HostDevice::CreateStream(std::string name) {
  return std::make_unique<HostStream>(std::move(name), parallel_, options_.delay, options_.cpus);
}

std::unique_ptr<Stream> HostDevice::CreateHostStream(std::string name) {
  return CreateStream(std::move(name));
}

void HostDevice::CopyRowsToHost(const RowsCopy& copy, Stream& stream) {
  CheckRows(copy);
  if (copy.bytes() == 0) return;
  SubmitCopy(copy, {copy.src, Extent(copy, copy.src_stride)},
             {copy.dst, Extent(copy, copy.dst_stride)}, arena_->range(), stream);
}

void HostDevice::CopyRowsFromHost(const RowsCopy& copy, Stream& stream) {
  CheckRows(copy);
  if (copy.bytes() == 0) return;
  SubmitCopy(copy, {copy.dst, Extent(copy, copy.dst_stride)},
             {copy.src, Extent(copy, copy.src_stride)}, arena_->range(), stream);
}

}  // namespace upipe::kernels
