// The devices a worker offers: what they are and whether they are well. One slot is one device, in
// the order of the inventory.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "upipe/v1/inventory.pb.h"

namespace upipe::worker {

// Why no rank may be placed on a device with these readings; empty where one may.
std::string SicknessOf(const v1::SlotDevice& device);
// An error of the driver's after which a device works no more, or not for long.
bool IsFatalXid(int xid);

class DeviceInventory {
 public:
  virtual ~DeviceInventory() = default;
  // One after another, as they are now, with `sick` filled in.
  virtual std::vector<v1::SlotDevice> Read() = 0;
  // Blocks for about `longest`; less, and true, when the driver told of an error of a device.
  virtual bool AwaitNews(absl::Duration longest) = 0;
};

// Tells of changes by a thread of its own.
class DeviceWatch {
 public:
  using Changed = std::function<void(std::vector<v1::SlotDevice> devices)>;
  // `known`: what was read before. Of the first so many devices.
  DeviceWatch(std::shared_ptr<DeviceInventory> inventory, std::vector<v1::SlotDevice> known,
              Changed changed);
  ~DeviceWatch();

 private:
  void Loop(std::vector<v1::SlotDevice> known);

  const std::shared_ptr<DeviceInventory> inventory_;
  const Changed changed_;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

// NVIDIA devices through the library NVML, loaded here. `visible`: ordinals or UUIDs of those to
// offer, in this order, as CUDA_VISIBLE_DEVICES names them; none = all, by PCI address. Unavailable
// when the library, a driver or a device is not there, InvalidArgument for a name that is none.
absl::StatusOr<std::shared_ptr<DeviceInventory>> OpenNvmlInventory(
    const std::string& library, const std::vector<std::string>& visible);

}  // namespace upipe::worker
