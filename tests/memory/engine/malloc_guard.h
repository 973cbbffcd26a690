// Watches every way this process can take memory from the C library or the kernel while armed.
// Linking malloc_guard.cc into a binary replaces malloc and its family, and mmap, in all of its
// code, shared libraries included.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace upipe::testing {

// From here on every single request above `limit_bytes`, by any thread, is remembered with its
// stack. Requests succeed.
void ArmMallocGuard(size_t limit_bytes);

// Stops watching. One text per request remembered (the first 32): call, bytes, stack.
std::vector<std::string> DisarmMallocGuard();

// Requests of any size while armed: zero means that nothing was watched at all.
size_t RequestsSeen();

}  // namespace upipe::testing
