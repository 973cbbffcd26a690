// NVIDIA's management library, loaded at run time: the few calls the inventory makes, declared here
// so that no header of it is needed. All of them return 0 when they worked.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace upipe::worker {

struct NvmlDeviceHandle;
struct NvmlEventSet;

// Layouts, numbers and names are the library's.
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlEventData {
  NvmlDeviceHandle* device;
  unsigned long long event_type;
  unsigned long long event_data;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};
inline constexpr int kNvmlSuccess = 0;
inline constexpr int kNvmlNotSupported = 3;
inline constexpr int kNvmlTimeout = 10;
inline constexpr int kNvmlGpuIsLost = 15;
inline constexpr int kNvmlResetRequired = 16;
inline constexpr unsigned long long kNvmlEventXid = 8;
inline constexpr int kNvmlUncorrected = 1;
inline constexpr int kNvmlSinceDriverLoad = 0;
inline constexpr unsigned kNvmlLinksMax = 18;

struct NvmlCalls {
  int (*Init)();
  int (*Shutdown)();
  const char* (*ErrorString)(int result);
  int (*DeviceGetCount)(unsigned* count);
  int (*DeviceGetHandleByIndex)(unsigned index, NvmlDeviceHandle** device);
  int (*DeviceGetName)(NvmlDeviceHandle* device, char* name, unsigned length);
  int (*DeviceGetUuid)(NvmlDeviceHandle* device, char* uuid, unsigned length);
  int (*DeviceGetMemoryInfo)(NvmlDeviceHandle* device, NvmlMemory* memory);
  int (*DeviceGetNvLinkState)(NvmlDeviceHandle* device, unsigned link, int* up);
  int (*DeviceGetEccMode)(NvmlDeviceHandle* device, int* current, int* pending);
  int (*DeviceGetTotalEccErrors)(NvmlDeviceHandle* device, int type, int counter,
                                 unsigned long long* count);
  int (*DeviceGetRemappedRows)(NvmlDeviceHandle* device, unsigned* correctable,
                               unsigned* uncorrectable, unsigned* pending, unsigned* failed);
  int (*EventSetCreate)(NvmlEventSet** set);
  int (*DeviceRegisterEvents)(NvmlDeviceHandle* device, unsigned long long types,
                              NvmlEventSet* set);
  int (*EventSetWait)(NvmlEventSet* set, NvmlEventData* data, unsigned timeout_millis);
  int (*EventSetFree)(NvmlEventSet* set);
};

// Loaded and initialised; shut down and unloaded with the last holder. Unavailable with the
// loader's or the library's words.
absl::StatusOr<std::shared_ptr<const NvmlCalls>> LoadNvml(const std::string& library);

}  // namespace upipe::worker
