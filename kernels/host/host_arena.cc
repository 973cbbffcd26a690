#include "kernels/host/host_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace upipe::kernels {
namespace {

size_t MappedBytes(int64_t bytes) { return static_cast<size_t>(std::max<int64_t>(bytes, 1)); }

}  // namespace

absl::StatusOr<std::unique_ptr<HostArena>> HostArena::Map(int64_t bytes, bool prefault) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("arena of ", bytes, " bytes"));
  }
  void* base = mmap(nullptr, MappedBytes(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot map an arena of ", bytes,
                                                     " bytes: ", std::strerror(errno),
                                                     "; lower the memory per rank"));
  }
  std::unique_ptr<HostArena> arena(new HostArena(base, bytes));
  if (prefault) {
    const int64_t page_bytes = sysconf(_SC_PAGESIZE);
    for (int64_t offset = 0; offset < bytes; offset += page_bytes) {
      static_cast<volatile char*>(base)[offset] = 0;
    }
  }
  return arena;
}

HostArena::~HostArena() { munmap(base_, MappedBytes(bytes_)); }

}  // namespace upipe::kernels
