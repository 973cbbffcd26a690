// Names of threads and the CPUs they may run on.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace upipe::kernels {

// Shown by top and gdb; the kernel keeps the first 15 characters.
void NameThread(std::thread& thread, const std::string& name);

// InvalidArgument naming the first CPU this process may not run on.
absl::Status CheckCpus(const std::vector<int>& cpus);

// Restricts the thread to `cpus`, checked before; none = wherever the kernel likes.
void PlaceThread(std::thread& thread, const std::vector<int>& cpus);

}  // namespace upipe::kernels
