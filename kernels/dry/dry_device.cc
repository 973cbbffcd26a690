#include "kernels/dry/dry_device.h"

#include <utility>

namespace upipe::kernels {
namespace {

// Addresses no process maps data at, and room for any step.
constexpr uintptr_t kFakeBase = uintptr_t{1} << 60;
constexpr uintptr_t kFakeHostBase = uintptr_t{1} << 61;
constexpr int64_t kUnlimitedBytes = int64_t{1} << 58;

class DryStream final : public Stream {
 public:
  explicit DryStream(std::string name) : name_(std::move(name)) {}
  const std::string& name() const override { return name_; }
  void Submit(Task) override {}
  Event Record() override { return Event(); }
  void Wait(const Event&) override {}

 private:
  const std::string name_;
};

}  // namespace

DryDevice::DryDevice(std::string backend, std::unique_ptr<OpTable> stands_for,
                     std::unique_ptr<OpTable> host)
    : backend_(std::move(backend)),
      stands_for_(std::move(stands_for)),
      host_(std::move(host)),
      ops_(*stands_for_, &counts_, /*on_host=*/false),
      host_ops_(host_ != nullptr ? *host_ : *stands_for_, &counts_, /*on_host=*/true),
      allocator_({.base = reinterpret_cast<void*>(kFakeBase), .arena_bytes = kUnlimitedBytes}),
      host_allocator_({.name = "host",
                       .base = reinterpret_cast<void*>(kFakeHostBase),
                       .arena_bytes = kUnlimitedBytes}) {}

std::unique_ptr<Stream> DryDevice::CreateStream(std::string name) {
  return std::make_unique<DryStream>(std::move(name));
}

std::unique_ptr<Stream> DryDevice::CreateHostStream(std::string name) {
  return CreateStream(std::move(name));
}

void DryDevice::CopyRowsToHost(const RowsCopy& copy, Stream&) {
  CheckRows(copy);
  ++counts_->copies_to_host;
  counts_->bytes_to_host += copy.bytes();
}

void DryDevice::CopyRowsFromHost(const RowsCopy& copy, Stream&) {
  CheckRows(copy);
  ++counts_->copies_from_host;
  counts_->bytes_from_host += copy.bytes();
}

}  // namespace upipe::kernels
