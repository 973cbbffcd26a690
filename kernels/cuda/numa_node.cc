#include "kernels/cuda/numa_node.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace upipe::kernels {

std::optional<int> NumaNodeOfPci(const std::string& address, const std::string& sysfs) {
  std::ifstream file(
      absl::StrCat(sysfs, "/bus/pci/devices/", absl::AsciiStrToLower(address), "/numa_node"));
  int node = -1;
  if (!(file >> node) || node < 0) return std::nullopt;
  return node;
}

void PreferNumaNode(void* begin, int64_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of the kernel
  constexpr int kMaskBits = std::numeric_limits<unsigned long>::digits;
  if (node >= kMaskBits || bytes <= 0) return;
  const unsigned long mask = 1ul << node;
  // The kernel reads one bit less than it is told.
  syscall(SYS_mbind, begin, bytes, kPreferred, &mask, kMaskBits + 1, 0);
}

}  // namespace upipe::kernels
