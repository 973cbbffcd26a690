#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "worker/inventory/device_inventory.h"
#include "worker/inventory/nvml_library.h"

namespace upipe::worker {
namespace {

constexpr size_t kTextBytes = 96;  // what the library writes at most

class NvmlInventory final : public DeviceInventory {
 public:
  explicit NvmlInventory(std::shared_ptr<const NvmlCalls> nvml) : nvml_(std::move(nvml)) {}
  ~NvmlInventory() override {
    if (events_ != nullptr) nvml_->EventSetFree(events_);
  }

  absl::Status Find(const std::vector<std::string>& visible) {
    UPIPE_ASSIGN_OR_RETURN(const std::vector<NvmlDeviceHandle*> all, All());
    if (all.empty()) return absl::UnavailableError("NVML knows no device on this machine");
    if (visible.empty()) devices_ = all;
    for (const std::string& name : visible) {
      UPIPE_ASSIGN_OR_RETURN(NvmlDeviceHandle * device, Named(name, all));
      devices_.push_back(device);
    }
    Listen();
    return absl::OkStatus();
  }

  std::vector<v1::SlotDevice> Read() override {
    std::vector<v1::SlotDevice> read;
    for (NvmlDeviceHandle* device : devices_) read.push_back(ReadOne(device));
    return read;
  }

  bool AwaitNews(absl::Duration longest) override {
    const auto millis = static_cast<unsigned>(absl::ToInt64Milliseconds(longest));
    NvmlEventData event{};
    const int result =
        events_ == nullptr ? kNvmlNotSupported : nvml_->EventSetWait(events_, &event, millis);
    if (result == kNvmlTimeout) return false;
    if (result != kNvmlSuccess) {
      absl::SleepFor(longest);  // it cannot be listened to
      return false;
    }
    if (event.event_type != kNvmlEventXid) return false;
    std::lock_guard lock(mutex_);
    int& last = last_xid_[event.device];
    // A fatal one is not forgotten over what follows from it.
    if (!IsFatalXid(last)) last = static_cast<int>(event.event_data);
    return true;
  }

 private:
  absl::Status Failed(const char* call, int result) const {
    return absl::UnavailableError(absl::StrCat(call, ": ", nvml_->ErrorString(result)));
  }

  absl::StatusOr<std::vector<NvmlDeviceHandle*>> All() const {
    unsigned count = 0;
    if (const int result = nvml_->DeviceGetCount(&count); result != kNvmlSuccess)
      return Failed("nvmlDeviceGetCount", result);
    std::vector<NvmlDeviceHandle*> all(count);
    for (unsigned i = 0; i < count; ++i) {
      if (const int result = nvml_->DeviceGetHandleByIndex(i, &all[i]); result != kNvmlSuccess)
        return Failed(absl::StrCat("nvmlDeviceGetHandleByIndex(", i, ")").c_str(), result);
    }
    return all;
  }

  absl::StatusOr<NvmlDeviceHandle*> Named(const std::string& name,
                                          const std::vector<NvmlDeviceHandle*>& all) const {
    int ordinal = 0;
    if (absl::SimpleAtoi(name, &ordinal) && ordinal >= 0 &&
        ordinal < static_cast<int>(all.size())) {
      return all[ordinal];
    }
    for (NvmlDeviceHandle* device : all) {
      if (Text(nvml_->DeviceGetUuid, device) == name) return device;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is none of this machine's ", all.size(), " devices"));
  }

  // Devices tell of critical errors of the driver from here on.
  void Listen() {
    if (nvml_->EventSetCreate(&events_) != kNvmlSuccess) {
      events_ = nullptr;
      return;
    }
    for (NvmlDeviceHandle* device : devices_)
      nvml_->DeviceRegisterEvents(device, kNvmlEventXid, events_);
  }

  static std::string Text(int (*call)(NvmlDeviceHandle*, char*, unsigned),
                          NvmlDeviceHandle* device) {
    std::array<char, kTextBytes> text{};
    return call(device, text.data(), kTextBytes) == kNvmlSuccess ? text.data() : "";
  }

  // What a device does not have is left out.
  v1::SlotDevice ReadOne(NvmlDeviceHandle* device) {
    v1::SlotDevice read;
    read.set_name(Text(nvml_->DeviceGetName, device));
    read.set_uuid(Text(nvml_->DeviceGetUuid, device));
    NvmlMemory memory{};
    const int answered = nvml_->DeviceGetMemoryInfo(device, &memory);
    read.set_memory_bytes(static_cast<int64_t>(memory.total));
    for (unsigned link = 0; link < kNvmlLinksMax; ++link) {
      int up = 0;
      if (nvml_->DeviceGetNvLinkState(device, link, &up) == kNvmlSuccess && up != 0)
        read.set_nvlinks(read.nvlinks() + 1);
    }
    int current = 0, after_reset = 0;
    read.set_ecc(nvml_->DeviceGetEccMode(device, &current, &after_reset) == kNvmlSuccess &&
                 current != 0);
    unsigned long long errors = 0;
    if (nvml_->DeviceGetTotalEccErrors(device, kNvmlUncorrected, kNvmlSinceDriverLoad, &errors) ==
        kNvmlSuccess)
      read.set_uncorrectable_errors(static_cast<int64_t>(errors));
    unsigned correctable = 0, uncorrectable = 0, pending = 0, failed = 0;
    if (nvml_->DeviceGetRemappedRows(device, &correctable, &uncorrectable, &pending, &failed) ==
        kNvmlSuccess) {
      read.set_remap_pending(pending != 0);
      read.set_remap_failed(failed != 0);
    }
    {
      std::lock_guard lock(mutex_);
      read.set_last_xid(last_xid_[device]);
    }
    read.set_sick(SicknessOf(read));
    if (read.sick().empty() && (answered == kNvmlGpuIsLost || answered == kNvmlResetRequired))
      read.set_sick(absl::StrCat("NVML says: ", nvml_->ErrorString(answered)));
    return read;
  }

  const std::shared_ptr<const NvmlCalls> nvml_;
  std::vector<NvmlDeviceHandle*> devices_;
  NvmlEventSet* events_ = nullptr;
  std::mutex mutex_;
  std::map<NvmlDeviceHandle*, int> last_xid_;  // under mutex_
};

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceInventory>> OpenNvmlInventory(
    const std::string& library, const std::vector<std::string>& visible) {
  UPIPE_ASSIGN_OR_RETURN(std::shared_ptr<const NvmlCalls> nvml, LoadNvml(library));
  auto inventory = std::make_shared<NvmlInventory>(std::move(nvml));
  UPIPE_RETURN_IF_ERROR(inventory->Find(visible));
  return inventory;
}

}  // namespace upipe::worker
