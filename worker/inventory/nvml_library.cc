#include "worker/inventory/nvml_library.h"

#include <dlfcn.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::worker {
namespace {

template <typename Function>
void Find(void* library, const char* name, Function*& call, std::string* missing) {
  call = reinterpret_cast<Function*>(dlsym(library, name));
  if (call == nullptr) absl::StrAppend(missing, missing->empty() ? "" : ", ", name);
}

// Names of what the library lacks; empty: nothing.
std::string FindAll(void* library, NvmlCalls& calls) {
  std::string missing;
  Find(library, "nvmlInit_v2", calls.Init, &missing);
  Find(library, "nvmlShutdown", calls.Shutdown, &missing);
  Find(library, "nvmlErrorString", calls.ErrorString, &missing);
  Find(library, "nvmlDeviceGetCount_v2", calls.DeviceGetCount, &missing);
  Find(library, "nvmlDeviceGetHandleByIndex_v2", calls.DeviceGetHandleByIndex, &missing);
  Find(library, "nvmlDeviceGetName", calls.DeviceGetName, &missing);
  Find(library, "nvmlDeviceGetUUID", calls.DeviceGetUuid, &missing);
  Find(library, "nvmlDeviceGetMemoryInfo", calls.DeviceGetMemoryInfo, &missing);
  Find(library, "nvmlDeviceGetNvLinkState", calls.DeviceGetNvLinkState, &missing);
  Find(library, "nvmlDeviceGetEccMode", calls.DeviceGetEccMode, &missing);
  Find(library, "nvmlDeviceGetTotalEccErrors", calls.DeviceGetTotalEccErrors, &missing);
  Find(library, "nvmlDeviceGetRemappedRows", calls.DeviceGetRemappedRows, &missing);
  Find(library, "nvmlEventSetCreate", calls.EventSetCreate, &missing);
  Find(library, "nvmlDeviceRegisterEvents", calls.DeviceRegisterEvents, &missing);
  Find(library, "nvmlEventSetWait_v2", calls.EventSetWait, &missing);
  Find(library, "nvmlEventSetFree", calls.EventSetFree, &missing);
  return missing;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const NvmlCalls>> LoadNvml(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::UnavailableError(absl::StrCat("no NVML: ", dlerror()));
  auto calls = std::make_unique<NvmlCalls>();
  if (const std::string missing = FindAll(handle, *calls); !missing.empty()) {
    dlclose(handle);
    return absl::UnavailableError(absl::StrCat(library, " lacks ", missing));
  }
  if (const int result = calls->Init(); result != kNvmlSuccess) {
    const std::string text = calls->ErrorString(result);
    dlclose(handle);
    return absl::UnavailableError(absl::StrCat("nvmlInit: ", text));
  }
  return std::shared_ptr<const NvmlCalls>(calls.release(), [handle](const NvmlCalls* loaded) {
    loaded->Shutdown();
    delete loaded;
    dlclose(handle);
  });
}

}  // namespace upipe::worker
