#include "kernels/host/host_device.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/host/thread_placement.h"

namespace upipe::kernels {
namespace {

void SubmitCopy(void* to, const void* from, int64_t bytes, Stream& stream) {
  if (bytes == 0) return;
  stream.Submit([to, from, bytes](ExecContext&) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostDevice>> HostDevice::Create(const Options& options,
                                                               std::unique_ptr<OpTable> ops) {
  if (options.num_threads < 1 || options.num_threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.name, " device: num_threads = ", options.num_threads, ", must be 1 to 1024"));
  }
  UPIPE_RETURN_IF_ERROR(CheckCpus(options.cpus));
  UPIPE_ASSIGN_OR_RETURN(auto arena, HostArena::Map(options.arena_bytes, options.prefault));
  return std::unique_ptr<HostDevice>(new HostDevice(options, std::move(ops), std::move(arena)));
}

HostDevice::HostDevice(const Options& options, std::unique_ptr<OpTable> ops,
                       std::unique_ptr<HostArena> arena)
    : options_(options),
      ops_(std::move(ops)),
      arena_(std::move(arena)),
      parallel_(std::make_shared<HostParallelFor>(options.num_threads, options.cpus)),
      allocator_({.base = arena_->base(),
                  .arena_bytes = arena_->bytes(),
                  .poison_freed = options.poison_freed}) {}

HostDevice::~HostDevice() {
  UPIPE_CHECK(parallel_.use_count() == 1)
      << parallel_.use_count() - 1 << " streams outlive device " << options_.name;
}

std::unique_ptr<Stream> HostDevice::CreateStream(std::string name) {
  return std::make_unique<HostStream>(std::move(name), parallel_, options_.delay, options_.cpus);
}

void HostDevice::CopyToHost(void* host, const void* device, int64_t bytes, Stream& stream) {
  SubmitCopy(host, device, bytes, stream);
}

void HostDevice::CopyFromHost(void* device, const void* host, int64_t bytes, Stream& stream) {
  SubmitCopy(device, host, bytes, stream);
}

}  // namespace upipe::kernels
