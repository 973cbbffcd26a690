// Which NUMA node a PCI device hangs on, and memory placed there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace upipe::kernels {

// By <sysfs>/bus/pci/devices/<address>/numa_node; nothing where that is absent or says none. The
// address may be in either case, "0000:1B:00.0".
std::optional<int> NumaNodeOfPci(const std::string& address, const std::string& sysfs = "/sys");

// Pages of [begin, begin + bytes) that are not there yet come from `node` while it has any. Silent
// where the kernel refuses.
void PreferNumaNode(void* begin, int64_t bytes, int node);

}  // namespace upipe::kernels
