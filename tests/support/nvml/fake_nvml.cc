// A management library of NVIDIA's that knows the devices a file describes: what UPIPE_FAKE_NVML
// names, read at every call, a device a line of "key=value" words:
//   uuid=GPU-a name=NVIDIA_H200 memory=1000 links=18 ecc=1 errors=0 pending=0 failed=0 result=0
//   xids=79,31
// `result` is what every question about the device answers; XIDs are told once each, in order.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kDriverNotLoaded = 9, kTimeout = 10, kNotSupported = 3;

struct Memory {
  unsigned long long total, free, used;
};
struct EventData {
  void* device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
using Device = std::map<std::string, std::string>;

std::mutex mutex;
std::map<size_t, size_t> told;  // XIDs by device

std::vector<Device> Devices() {
  std::vector<Device> devices;
  const char* path = std::getenv("UPIPE_FAKE_NVML");
  std::ifstream file(path == nullptr ? "" : path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    Device device;
    for (std::string word; words >> word;)
      device[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    if (!device.empty()) devices.push_back(device);
  }
  return devices;
}

// Handles are 1, 2, ..
Device Of(void* handle) {
  const std::vector<Device> devices = Devices();
  const size_t index = reinterpret_cast<size_t>(handle) - 1;
  return index < devices.size() ? devices[index] : Device{{"result", "15"}};
}

long long Number(const Device& device, const std::string& key) {
  const auto found = device.find(key);
  return found == device.end() ? 0 : std::atoll(found->second.c_str());
}

int Result(const Device& device) { return static_cast<int>(Number(device, "result")); }

int Text(void* handle, const char* key, char* text, unsigned length) {
  const Device device = Of(handle);
  const auto found = device.find(key);
  std::string value = found == device.end() ? "" : found->second;
  std::replace(value.begin(), value.end(), '_', ' ');
  std::strncpy(text, value.c_str(), length - 1);
  return Result(device);
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  std::lock_guard lock(mutex);
  told.clear();
  return std::getenv("UPIPE_FAKE_NVML") == nullptr ? kDriverNotLoaded : kSuccess;
}
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int result) {
  return result == kDriverNotLoaded ? "Driver Not Loaded" : "GPU is lost";
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(Devices().size());
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<size_t>(index) + 1);
  return kSuccess;
}
int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  return Text(device, "name", name, length);
}
int nvmlDeviceGetUUID(void* device, char* uuid, unsigned length) {
  Text(device, "uuid", uuid, length);
  return kSuccess;
}
int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  const Device device = Of(handle);
  memory->total = static_cast<unsigned long long>(Number(device, "memory"));
  return Result(device);
}
int nvmlDeviceGetNvLinkState(void* handle, unsigned link, int* up) {
  *up = static_cast<long long>(link) < Number(Of(handle), "links") ? 1 : 0;
  return kSuccess;
}
int nvmlDeviceGetEccMode(void* handle, int* current, int* pending) {
  *current = *pending = static_cast<int>(Number(Of(handle), "ecc"));
  return kSuccess;
}
int nvmlDeviceGetTotalEccErrors(void* handle, int type, int counter, unsigned long long* count) {
  const Device device = Of(handle);
  if (Number(device, "ecc") == 0) return kNotSupported;
  // Corrected ones, and those since ever, are many and no matter.
  *count = type == 1 && counter == 0 ? static_cast<unsigned long long>(Number(device, "errors"))
                                     : 1'000'000;
  return kSuccess;
}
int nvmlDeviceGetRemappedRows(void* handle, unsigned* correctable, unsigned* uncorrectable,
                              unsigned* pending, unsigned* failed) {
  const Device device = Of(handle);
  *correctable = *uncorrectable = 7;
  *pending = static_cast<unsigned>(Number(device, "pending"));
  *failed = static_cast<unsigned>(Number(device, "failed"));
  return kSuccess;
}
int nvmlEventSetCreate(void** set) {
  *set = &told;
  return kSuccess;
}
int nvmlDeviceRegisterEvents(void*, unsigned long long, void*) { return kSuccess; }
int nvmlEventSetWait_v2(void*, EventData* data, unsigned timeout_millis) {
  for (unsigned waited = 0;; waited += 5) {
    {
      std::lock_guard lock(mutex);
      const std::vector<Device> devices = Devices();
      for (size_t d = 0; d < devices.size(); ++d) {
        const auto found = devices[d].find("xids");
        if (found == devices[d].end()) continue;
        std::istringstream numbers(found->second);
        size_t index = 0;
        for (std::string number; std::getline(numbers, number, ','); ++index) {
          if (index != told[d]) continue;
          ++told[d];
          *data = {reinterpret_cast<void*>(d + 1), 8, std::stoull(number), 0, 0};
          return kSuccess;
        }
      }
    }
    if (waited >= timeout_millis) return kTimeout;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}
int nvmlEventSetFree(void*) { return kSuccess; }

}  // extern "C"
