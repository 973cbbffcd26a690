#include "tools/gpu_check/machine.h"

#include <dlfcn.h>

#include <array>

#include "absl/strings/str_cat.h"

namespace upipe::gpu_check {
namespace {

// Loaded for good: unloading NVIDIA's libraries is not worth its risks.
class Library {
 public:
  explicit Library(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}
  explicit operator bool() const { return handle_ != nullptr; }
  template <typename Function>
  Function* Find(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* const handle_;
};

// "13.0" of 13000, as the driver and cuBLAS number theirs with `major` units to one.
std::string Dotted(int64_t version, int64_t major, int64_t minor) {
  return absl::StrCat(version / major, ".", version % major / minor, ".", version % minor);
}

struct NvmlMemory {
  unsigned long long total, free, used;  // NOLINT(runtime/int): NVML's types
};

constexpr char kNvml[] = "libnvidia-ml.so.1";

// The first GPU, of a library that was initialised.
void* FirstDevice(const Library& nvml) {
  const auto init = nvml.Find<int()>("nvmlInit_v2");
  const auto by_index = nvml.Find<int(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
  void* device = nullptr;
  if (init == nullptr || by_index == nullptr || init() != 0) return nullptr;
  return by_index(0, &device) == 0 ? device : nullptr;
}

using Notes = std::vector<std::pair<std::string, std::string>>;

void DescribeDriver(Notes& notes) {
  const Library nvml(kNvml);
  void* const device = FirstDevice(nvml);
  std::array<char, 96> text = {};
  const auto driver = nvml.Find<int(char*, unsigned)>("nvmlSystemGetDriverVersion");
  const auto name = nvml.Find<int(void*, char*, unsigned)>("nvmlDeviceGetName");
  const auto memory = nvml.Find<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  if (device != nullptr && driver != nullptr && driver(text.data(), text.size()) == 0) {
    notes.emplace_back("driver", text.data());
  }
  if (device != nullptr && name != nullptr && name(device, text.data(), text.size()) == 0) {
    notes.emplace_back("gpu", text.data());
  }
  NvmlMemory bytes = {};
  if (device != nullptr && memory != nullptr && memory(device, &bytes) == 0) {
    notes.emplace_back("gpu_memory_bytes", absl::StrCat(bytes.total));
    notes.emplace_back("gpu_memory_bytes_in_use_before", absl::StrCat(bytes.used));
  }
  const Library cuda("libcuda.so.1");
  int count = 0, version = 0;
  const auto init = cuda.Find<int(unsigned)>("cuInit");
  const auto get_count = cuda.Find<int(int*)>("cuDeviceGetCount");
  const auto get_version = cuda.Find<int(int*)>("cuDriverGetVersion");
  if (get_version != nullptr && get_version(&version) == 0) {
    notes.emplace_back("driver_cuda", Dotted(version, 1000, 10));
  }
  if (init != nullptr && get_count != nullptr && init(0) == 0 && get_count(&count) == 0) {
    notes.emplace_back("gpus", absl::StrCat(count));
  } else {
    notes.emplace_back("gpus", cuda ? "the driver finds none" : "no driver: libcuda.so.1");
  }
}

}  // namespace

Notes DescribeMachine() {
  Notes notes;
  DescribeDriver(notes);
  const auto sized = [&](const char* name, const char* file, const char* call, int64_t major,
                         int64_t minor) {
    const Library library(file);
    const auto version = library.Find<size_t()>(call);
    notes.emplace_back(name, version == nullptr
                                 ? absl::StrCat("not found: ", file)
                                 : Dotted(static_cast<int64_t>(version()), major, minor));
  };
  sized("cublaslt", "libcublasLt.so.13", "cublasLtGetVersion", 10000, 100);
  sized("cudnn", "libcudnn.so.9", "cudnnGetVersion", 10000, 100);
  const Library nccl("libnccl.so.2"), nvrtc("libnvrtc.so.13");
  int first = 0, second = 0;
  const auto nccl_version = nccl.Find<int(int*)>("ncclGetVersion");
  const bool has_nccl = nccl_version != nullptr && nccl_version(&first) == 0;
  notes.emplace_back("nccl", has_nccl ? Dotted(first, 10000, 100) : "not found: libnccl.so.2");
  const auto nvrtc_version = nvrtc.Find<int(int*, int*)>("nvrtcVersion");
  const bool has_nvrtc = nvrtc_version != nullptr && nvrtc_version(&first, &second) == 0;
  notes.emplace_back("nvrtc",
                     has_nvrtc ? absl::StrCat(first, ".", second) : "not found: libnvrtc.so.13");
  return notes;
}

std::optional<int64_t> DeviceBytesInUse() {
  static const Library& nvml = *new Library(kNvml);
  static void* const device = FirstDevice(nvml);
  const auto memory = nvml.Find<int(void*, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
  NvmlMemory bytes = {};
  if (device == nullptr || memory == nullptr || memory(device, &bytes) != 0) return std::nullopt;
  return static_cast<int64_t>(bytes.used);
}

}  // namespace upipe::gpu_check
