// A device without memory or arithmetic: addresses, peaks and costs of a step at any size, in
// milliseconds.
#pragma once

#include <memory>
#include <string>

#include "kernels/api/device.h"
#include "kernels/dry/dry_counts.h"
#include "kernels/dry/dry_op_table.h"

namespace upipe::kernels {

// Not thread-safe: one host thread drives it. Tasks submitted to its streams are dropped, its
// events are always reached.
class DryDevice final : public Device {
 public:
  // Stands in for a device of this backend name and these ops.
  DryDevice(std::string backend, std::unique_ptr<OpTable> stands_for);

  std::string name() const override { return "dry(" + backend_ + ")"; }
  Allocator& allocator() override { return allocator_; }
  OpTable& ops() override { return ops_; }
  std::unique_ptr<Stream> CreateStream(std::string name) override;
  Allocator& host_allocator() override { return host_allocator_; }
  OpTable& host_ops() override { return ops_; }
  std::unique_ptr<Stream> CreateHostStream(std::string name) override;
  void CopyRowsToHost(const RowsCopy& copy, Stream& stream) override;
  void CopyRowsFromHost(const RowsCopy& copy, Stream& stream) override;

  // Of all ops, on the device and on the host.
  const DryCounts& counts() const { return counts_; }
  void ResetCounts() { counts_ = DryCounts(); }

 private:
  const std::string backend_;
  DryCounts counts_;
  DryOpTable ops_;
  Allocator allocator_;
  Allocator host_allocator_;
};

}  // namespace upipe::kernels
