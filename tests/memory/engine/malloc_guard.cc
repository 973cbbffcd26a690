#include "tests/memory/engine/malloc_guard.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

// The allocator underneath, by its second names.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace upipe::testing {
namespace {

constexpr int kMaxRemembered = 32;
constexpr int kMaxFrames = 24;

struct Request {
  const char* call = nullptr;
  size_t bytes = 0;
  void* frames[kMaxFrames];
  int num_frames = 0;
};

// Plain storage: nothing here may allocate.
Request requests[kMaxRemembered];
std::atomic<int> num_requests{0};
std::atomic<size_t> num_seen{0};
std::atomic<bool> armed{false};
std::atomic<size_t> limit{0};
thread_local bool taking_stack = false;

void Watch(const char* call, size_t bytes) {
  if (!armed.load(std::memory_order_acquire) || taking_stack) return;
  num_seen.fetch_add(1, std::memory_order_relaxed);
  if (bytes <= limit.load(std::memory_order_relaxed)) return;
  const int index = num_requests.fetch_add(1, std::memory_order_relaxed);
  if (index >= kMaxRemembered) return;
  taking_stack = true;
  requests[index].call = call;
  requests[index].bytes = bytes;
  requests[index].num_frames = backtrace(requests[index].frames, kMaxFrames);
  taking_stack = false;
}

std::string Describe(const Request& request) {
  std::string text =
      std::string(request.call) + " of " + std::to_string(request.bytes) + " bytes from";
  char** symbols = backtrace_symbols(request.frames, request.num_frames);
  for (int i = 2; symbols != nullptr && i < request.num_frames; ++i)
    text += std::string("\n    ") + symbols[i];
  free(symbols);
  return text;
}

}  // namespace

void ArmMallocGuard(size_t limit_bytes) {
  void* frame = nullptr;
  backtrace(&frame, 1);  // its first call loads a library
  num_requests = 0;
  num_seen = 0;
  limit = limit_bytes;
  armed.store(true, std::memory_order_release);
}

std::vector<std::string> DisarmMallocGuard() {
  armed = false;
  std::vector<std::string> texts;
  for (int i = 0; i < std::min(num_requests.load(), kMaxRemembered); ++i)
    texts.push_back(Describe(requests[i]));
  return texts;
}

size_t RequestsSeen() { return num_seen; }

}  // namespace upipe::testing

extern "C" {

void* malloc(size_t bytes) noexcept {
  upipe::testing::Watch("malloc", bytes);
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t size) noexcept {
  upipe::testing::Watch("calloc", count * size);
  return __libc_calloc(count, size);
}

void* realloc(void* block, size_t bytes) noexcept {
  upipe::testing::Watch("realloc", bytes);
  return __libc_realloc(block, bytes);
}

void* memalign(size_t alignment, size_t bytes) noexcept {
  upipe::testing::Watch("memalign", bytes);
  return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  upipe::testing::Watch("aligned_alloc", bytes);
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** block, size_t alignment, size_t bytes) noexcept {
  upipe::testing::Watch("posix_memalign", bytes);
  void* taken = __libc_memalign(alignment, bytes);
  if (taken == nullptr) return ENOMEM;
  *block = taken;
  return 0;
}

// What libraries take past malloc; the C library's own calls (thread stacks, large mallocs) do not
// come through here.
void* mmap(void* address, size_t bytes, int protection, int flags, int file,
           off_t offset) noexcept {
  if ((flags & MAP_ANONYMOUS) != 0) upipe::testing::Watch("mmap", bytes);
  return reinterpret_cast<void*>(
      syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}

}  // extern "C"
