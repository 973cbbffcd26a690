#include "common/position_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe {
namespace {

constexpr const char* kPassNames[] = {"idle", "starting",  "embed",     "forward",
                                      "loss", "backward",  "optimizer", "evaluate",
                                      "done", "restoring", "checkpoint"};
static_assert(std::size(kPassNames) == kNumStepPasses);

absl::StatusOr<void*> MapPage(int fd) {
  void* memory = mmap(nullptr, sizeof(PositionPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return absl::ErrnoToStatus(errno, "cannot map the position page");
  return memory;
}

}  // namespace

const char* NameOf(StepPass pass) {
  const auto index = static_cast<size_t>(pass);
  return index < std::size(kPassNames) ? kPassNames[index] : "unknown";
}

absl::StatusOr<PositionMapping> PositionMapping::Create() {
  const int fd = memfd_create("upipe-position", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return absl::ErrnoToStatus(errno, "cannot create a position page");
  // A trainer that could shrink it would end its worker by SIGBUS.
  if (ftruncate(fd, sizeof(PositionPage)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    close(fd);
    return absl::ErrnoToStatus(error, "cannot size and seal a position page");
  }
  absl::StatusOr<void*> memory = MapPage(fd);
  if (!memory.ok()) {
    close(fd);
    return memory.status();
  }
  return PositionMapping(fd, new (*memory) PositionPage);
}

absl::StatusOr<PositionMapping> PositionMapping::Open(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("no position page on descriptor ", fd));
  }
  if (info.st_size != sizeof(PositionPage)) {
    return absl::FailedPreconditionError(absl::StrCat("descriptor ", fd, " holds ", info.st_size,
                                                      " bytes, a position page has ",
                                                      sizeof(PositionPage)));
  }
  absl::StatusOr<void*> memory = MapPage(fd);
  if (!memory.ok()) return memory.status();
  auto* page = static_cast<PositionPage*>(*memory);
  if (page->magic != PositionPage::kMagic) {
    munmap(*memory, sizeof(PositionPage));
    return absl::FailedPreconditionError(
        absl::StrCat("descriptor ", fd, " holds no position page of this build"));
  }
  return PositionMapping(fd, page);
}

PositionMapping::PositionMapping(PositionMapping&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), page_(std::exchange(other.page_, nullptr)) {}

PositionMapping& PositionMapping::operator=(PositionMapping&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(page_, other.page_);
  return *this;
}

PositionMapping::~PositionMapping() {
  if (page_ != nullptr) munmap(page_, sizeof(PositionPage));
  if (fd_ >= 0) close(fd_);
}

}  // namespace upipe
