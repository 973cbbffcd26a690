// Loaded in front of libc (LD_PRELOAD) by the coordinator benchmark: every fsync and fdatasync
// takes UPIPE_BENCH_FSYNC_MICROSECONDS longer, as on a disk that is slower than this machine's.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

namespace {

using Sync = int (*)(int);

int SlowSync(const char* name, int descriptor) {
  static const char* text = std::getenv("UPIPE_BENCH_FSYNC_MICROSECONDS");
  if (text != nullptr) usleep(static_cast<useconds_t>(std::atoi(text)));
  return reinterpret_cast<Sync>(dlsym(RTLD_NEXT, name))(descriptor);
}

}  // namespace

extern "C" {

int fsync(int descriptor) { return SlowSync("fsync", descriptor); }
int fdatasync(int descriptor) { return SlowSync("fdatasync", descriptor); }

}  // extern "C"
