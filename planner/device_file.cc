#include "planner/device_file.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/spec/spec_checker.h"
#include "common/spec/yaml_message.h"
#include "common/status.h"
#include "planner/known_device_files.h"

namespace upipe::planner {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 50;  // sums of several stay far from 2^63
constexpr int64_t kMaxDevicesPerNode = 1024;

// "cudnn 9.19": digits with dots between them behind the name.
bool IsAttentionKernel(absl::string_view text) {
  if (text == "own") return true;
  if (!absl::ConsumePrefix(&text, "cudnn ")) return false;
  return !text.empty() && absl::ascii_isdigit(text.front()) && absl::ascii_isdigit(text.back()) &&
         !absl::StrContains(text, "..") && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(c) || c == '.';
         });
}

// The rules of numbers, each by the path of its field.
class DeviceChecker {
 public:
  void Source(const std::string& path, const std::string& source) {
    if (source.empty()) {
      checker_.Fail(absl::StrCat(path, ".source"),
                    "is required: say where the number is from, or \"measured: \" and how");
    }
  }

  // Whether `number` is there; what is must have a value from 0 on and a source.
  bool Number(const std::string& path, const v1::DeviceFile::Number& number, bool may_be_zero) {
    const std::string value = absl::StrCat(path, ".value");
    Source(path, number.source());
    if (!number.has_value()) return checker_.Fail(value, "is required");
    if (may_be_zero && number.value() == 0) return true;
    return checker_.Positive(value, number.value());
  }

  void Bytes(const std::string& path, const v1::DeviceFile::Bytes& bytes, int64_t min) {
    const std::string value = absl::StrCat(path, ".bytes");
    Source(path, bytes.source());
    if (!bytes.has_bytes()) {
      checker_.Fail(value, "is required, such as 80GiB");
    } else if (bytes.bytes() < min || bytes.bytes() > kMaxBytes) {
      checker_.Fail(value, absl::StrCat(bytes.bytes(), " is outside ", min, " to 1024TiB"));
    }
  }

  void Matmul(const std::string& path, const v1::DeviceFile::MatmulRate& rate) {
    Source(path, rate.source());
    checker_.Positive(absl::StrCat(path, ".flops"), rate.flops());
    const std::string half_rows = absl::StrCat(path, ".half_rows");
    if (!rate.has_half_rows()) {
      checker_.Fail(half_rows, "is required; 0 where the rate is the same at any number of rows");
    } else if (rate.half_rows() != 0) {
      checker_.Positive(half_rows, rate.half_rows());
    }
  }

  template <typename Rates>
  void Attention(const std::string& name, const Rates& rates) {
    int64_t before = 0;
    for (int i = 0; i < rates.size(); ++i) {
      const std::string path = absl::StrCat(name, "[", i, "]");
      const v1::DeviceFile::AttentionRate& rate = rates[i];
      Source(path, rate.source());
      const std::string length = absl::StrCat(path, ".length");
      if (checker_.Required(length, rate.length(), 1, kMaxContext) && rate.length() <= before) {
        checker_.Fail(length, absl::StrCat(FormatTokenCount(rate.length()), " follows ",
                                           FormatTokenCount(before), "; lengths ascend"));
      }
      before = std::max(before, rate.length());
      checker_.Positive(absl::StrCat(path, ".forward_flops"), rate.forward_flops());
      checker_.Positive(absl::StrCat(path, ".backward_flops"), rate.backward_flops());
    }
  }

  SpecChecker& fields() { return checker_; }

 private:
  SpecChecker checker_;
};

void CheckHead(const v1::DeviceFile& device, SpecChecker& checker) {
  if (!IsDeviceName(device.name())) {
    checker.Fail("name",
                 "must be 1 to 64 letters, digits, '.' or '-', the first a letter or digit");
  }
  if (device.backend() != "cpu" && device.backend() != "cuda") {
    checker.Fail("backend", "must be cpu or cuda");
  }
  if (!IsAttentionKernel(device.attention_kernel())) {
    checker.Fail("attention_kernel",
                 "must be own, or cudnn and its version, such as \"cudnn 9.19\"");
  }
  checker.Required("devices_per_node", device.devices_per_node(), 1, kMaxDevicesPerNode);
}

void CheckMemory(const v1::DeviceFile& device, DeviceChecker& checker) {
  const bool is_cpu = device.backend() == "cpu";
  if (!device.has_memory()) {
    checker.fields().Fail("memory", "is required");
  } else {
    checker.Bytes("memory", device.memory(), is_cpu ? 0 : 1);
    if (is_cpu && device.memory().bytes() > 0) {
      checker.fields().Fail("memory.bytes",
                            "must be 0 for backend cpu, whose memory is host_memory");
    }
  }
  if (device.has_host_memory()) checker.Bytes("host_memory", device.host_memory(), 1);
  if (device.has_context()) checker.Bytes("context", device.context(), 0);
  if (device.has_communicator()) checker.Bytes("communicator", device.communicator(), 0);
  if (device.has_fragmentation() &&
      checker.Number("fragmentation", device.fragmentation(), /*may_be_zero=*/true)) {
    checker.fields().Fraction("fragmentation.value", device.fragmentation().value());
  }
}

void CheckRates(const v1::DeviceFile& device, DeviceChecker& checker) {
  if (device.has_matmul_bf16()) checker.Matmul("matmul_bf16", device.matmul_bf16());
  if (device.has_matmul_fp32()) checker.Matmul("matmul_fp32", device.matmul_fp32());
  checker.Attention("attention_bf16", device.attention_bf16());
  checker.Attention("attention_fp32", device.attention_fp32());
  checker.Attention("attention_own_bf16", device.attention_own_bf16());
  if (device.attention_kernel() == "own" && device.attention_own_bf16_size() > 0) {
    checker.fields().Fail("attention_own_bf16",
                          "is for devices whose attention_kernel is another; write attention_bf16");
  }
  const bool bf16 = device.has_matmul_bf16() && device.attention_bf16_size() > 0;
  const bool fp32 = device.has_matmul_fp32() && device.attention_fp32_size() > 0;
  if (!bf16 && !fp32) {
    checker.fields().Fail(device.has_matmul_fp32() && !device.has_matmul_bf16() ? "attention_fp32"
                          : device.has_matmul_bf16()                            ? "attention_bf16"
                                                                                : "matmul_bf16",
                          "is required: rates of matmul and of attention of one storage type, bf16 "
                          "or fp32, at least");
  }
}

void CheckNumbers(const v1::DeviceFile& device, DeviceChecker& checker) {
  if (device.has_peak_flops()) checker.Number("peak_flops", device.peak_flops(), false);
  if (!device.has_memory_bandwidth()) {
    checker.fields().Fail("memory_bandwidth", "is required");
  } else {
    checker.Number("memory_bandwidth", device.memory_bandwidth(), false);
  }
  if (device.has_exchange_in_node()) {
    checker.Number("exchange_in_node", device.exchange_in_node(), false);
  } else if (device.devices_per_node() > 1) {
    checker.fields().Fail("exchange_in_node", absl::StrCat("is required where a node has ",
                                                           device.devices_per_node(), " devices"));
  }
  if (device.has_exchange_between_nodes()) {
    checker.Number("exchange_between_nodes", device.exchange_between_nodes(), false);
  }
  if (device.has_exchange_latency()) {
    checker.Number("exchange_latency", device.exchange_latency(), true);
  }
  if (device.has_host_copy()) checker.Number("host_copy", device.host_copy(), false);
  if (device.has_host_update()) checker.Number("host_update", device.host_update(), false);
  if (device.has_launch()) checker.Number("launch", device.launch(), true);
}

std::vector<v1::DeviceFile> ParseKnownDevices() {
  std::vector<v1::DeviceFile> devices;
  for (const KnownDeviceFile& file : KnownDeviceFiles()) {
    absl::StatusOr<v1::DeviceFile> device = ParseDeviceFile(file.text, file.filename);
    UPIPE_CHECK_OK(device.status());
    devices.push_back(*std::move(device));
  }
  return devices;
}

// Names of the known devices and of the files of `folder`, ascending, each once.
std::vector<std::string> NamesThereAre(const std::string& folder) {
  std::vector<std::string> names;
  for (const v1::DeviceFile& device : KnownDevices()) names.push_back(device.name());
  std::error_code error;
  for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
       file.increment(error)) {
    const std::filesystem::path path = file->path();
    if (path.extension() == ".yaml" && IsDeviceName(path.stem().string())) {
      names.push_back(path.stem().string());
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

}  // namespace

bool IsDeviceName(absl::string_view name) {
  return !name.empty() && name.size() <= 64 && absl::ascii_isalnum(name.front()) &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isalnum(c) || c == '.' || c == '-'; });
}

std::vector<Violation> CheckDeviceFile(const v1::DeviceFile& device) {
  DeviceChecker checker;
  CheckHead(device, checker.fields());
  CheckMemory(device, checker);
  CheckRates(device, checker);
  CheckNumbers(device, checker);
  return checker.fields().Take();
}

absl::StatusOr<v1::DeviceFile> ParseDeviceFile(absl::string_view text, absl::string_view filename) {
  v1::DeviceFile device;
  YamlMessageReader reader(filename, "device", device);
  reader.ReadText(text, kMaxDeviceFileBytes);
  reader.FailAll(CheckDeviceFile(device));
  UPIPE_RETURN_IF_ERROR(reader.status());
  return device;
}

absl::StatusOr<v1::DeviceFile> ReadDeviceFile(const std::string& path) {
  UPIPE_ASSIGN_OR_RETURN(const std::string text,
                         ReadTextFile(path, kMaxDeviceFileBytes, "the device file "));
  return ParseDeviceFile(text, path);
}

std::string DeviceFileToYaml(const v1::DeviceFile& device) { return MessageToYaml(device); }

const std::vector<v1::DeviceFile>& KnownDevices() {
  static const auto& devices = *new std::vector<v1::DeviceFile>(ParseKnownDevices());
  return devices;
}

absl::StatusOr<v1::DeviceFile> FindDevice(const std::string& name, const std::string& folder) {
  if (!IsDeviceName(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a device's name has 1 to 64 letters, digits, '.' or '-'; there are ",
                     absl::StrJoin(NamesThereAre(folder), ", ")));
  }
  if (!folder.empty()) {
    const std::string path = absl::StrCat(folder, "/", name, ".yaml");
    absl::StatusOr<v1::DeviceFile> device = ReadDeviceFile(path);
    if (device.ok() && device->name() != name) {
      return absl::InvalidArgumentError(absl::StrCat(path, " describes ", device->name(),
                                                     "; a device file has the name of its device"));
    }
    if (!absl::IsNotFound(device.status())) return device;
  }
  for (const v1::DeviceFile& device : KnownDevices()) {
    if (device.name() == name) return device;
  }
  return absl::NotFoundError(absl::StrCat("no device is called ", name, "; there are ",
                                          absl::StrJoin(NamesThereAre(folder), ", ")));
}

}  // namespace upipe::planner
