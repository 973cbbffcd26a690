#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "worker/inventory/device_inventory.h"

namespace upipe::worker {
namespace {

constexpr absl::Duration kListen = absl::Milliseconds(200);  // so long the end may take
constexpr absl::Duration kReadEvery = absl::Seconds(5);

bool IsSame(const v1::SlotDevice& a, const v1::SlotDevice& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

DeviceWatch::DeviceWatch(std::shared_ptr<DeviceInventory> inventory,
                         std::vector<v1::SlotDevice> known, Changed changed)
    : inventory_(std::move(inventory)), changed_(std::move(changed)) {
  thread_ = std::thread([this, known = std::move(known)] { Loop(known); });
}

DeviceWatch::~DeviceWatch() {
  closing_ = true;
  thread_.join();
}

void DeviceWatch::Loop(std::vector<v1::SlotDevice> known) {
  absl::Time next = absl::Now() + kReadEvery;
  while (!closing_) {
    const bool news = inventory_->AwaitNews(kListen);
    if (!news && absl::Now() < next) continue;
    next = absl::Now() + kReadEvery;
    std::vector<v1::SlotDevice> read = inventory_->Read();
    read.resize(std::min(read.size(), known.size()));
    if (std::equal(read.begin(), read.end(), known.begin(), known.end(), IsSame)) continue;
    known = read;
    changed_(std::move(read));
  }
}

}  // namespace upipe::worker
