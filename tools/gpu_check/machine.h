// What machine the check runs on, asked of whatever of NVIDIA's libraries is there: each is loaded
// when asked and no header of theirs is needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace upipe::gpu_check {

// Name and text: driver, GPUs, versions of the libraries, or that one is not found. Opens the
// driver: for a process of its own.
std::vector<std::pair<std::string, std::string>> DescribeMachine();

// Bytes in use on the first GPU, by whatever process, as NVML tells. Nothing without NVML.
std::optional<int64_t> DeviceBytesInUse();

}  // namespace upipe::gpu_check
