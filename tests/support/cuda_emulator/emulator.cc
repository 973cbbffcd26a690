#include "tests/support/cuda_emulator/emulator.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "tests/support/cuda_emulator/fiber.h"

constinit thread_local uint3 threadIdx = {}, blockIdx = {};
constinit thread_local dim3 blockDim = {}, gridDim = {};

namespace upipe::cuda_emulator {
namespace {

constexpr std::align_val_t kSharedAlignment{1024};
constexpr unsigned kThreadsMax = 1024;

// Bytes that die with their block or launch; of exactly the size asked for, so that
// AddressSanitizer sees an access beyond it.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes)
      : bytes_(bytes), data_(::operator new(std::max<size_t>(bytes, 1), kSharedAlignment)) {}
  ~SharedMemory() { ::operator delete(data_, kSharedAlignment); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void Poison() { std::memset(data_, 0xff, bytes_); }

 private:
  size_t bytes_;
  void* data_;
};

// "0-15, 17" of the indices for which `is` holds.
template <typename Is>
std::string Ranges(int count, const Is& is) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if (!is(i)) continue;
    int last = i;
    while (last + 1 < count && is(last + 1)) ++last;
    absl::StrAppend(&text, text.empty() ? "" : ", ", i);
    if (last > i) absl::StrAppend(&text, "-", last);
    i = last;
  }
  return text;
}

std::string Text(Site site) { return absl::StrCat(site.file, ":", site.line); }

bool Same(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

// What runs one grid at a time: the fibers and the state of the block that is on them.
class Machine {
 public:
  struct Launch {
    dim3 grid, block;
    size_t shared_bytes;
    Order order;
    unsigned first_block;  // along x
    void (*kernel)(const void*);
    const void* call;
  };

  // The error, or nothing.
  std::string Run(const Launch& launch);

  int thread() const { return running_; }
  void SyncBlock(Site site);
  void WaitUntil(bool (*ready)(const void*), const void* arg, Site site);
  void Meet(int first, int count, unsigned mask, void* mine, CollectiveBody body, Site site);
  [[noreturn]] void Fail(std::string&& what, Site site);
  void* DynamicSharedBytes() const { return dynamic_->data(); }
  void* SharedBytes(const void* declaration, size_t bytes);

 private:
  enum class State { kUnstarted, kReady, kAtBarrier, kAtMeeting, kWaiting, kDone };
  struct Thread {
    State state = State::kUnstarted;
    Fiber* fiber = nullptr;
    Site site = {};
    bool (*ready)(const void*) = nullptr;
    const void* ready_arg = nullptr;
  };
  struct Meeting {
    int first, count;
    unsigned mask;
    CollectiveBody body;
    Site site;
    int missing;
    void* threads[kWarpgroupSize];
  };
  struct Variable {
    const void* declaration;
    std::unique_ptr<SharedMemory> memory;
    int64_t block;  // that poisoned it last
  };

  void RunBlock();
  bool WarpTurn(int first);
  bool Turn(int thread);
  void AddIdle(Fiber& fiber);
  void AbandonFibers();
  void SetIndices(int thread);
  int InOrder(int turn) const {
    return launch_.order == Order::kAscending ? turn : num_threads_ - 1 - turn;
  }
  // On a fiber.
  void RunThreads();
  void Suspend(State state, Site site);
  std::string WhyNobodyCanGoOn() const;
  std::string Where() const;

  Launch launch_ = {};
  int num_threads_ = 0;
  uint3 block_index_ = {};
  int64_t block_count_ = 0;     // of all launches
  std::vector<uint3> indices_;  // of threads
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::vector<Meeting> meetings_;
  std::unique_ptr<SharedMemory> dynamic_;
  std::vector<Variable> variables_;
  size_t static_bytes_ = 0;
  int running_ = -1;
  int next_turn_ = 0;  // of threads that have not started
  int num_done_ = 0, num_at_barrier_ = 0;
  Site barrier_ = {};  // where they are
  std::string error_;
};

thread_local Machine* current = nullptr;
thread_local int64_t num_blocks = 0;

std::string Limits(const Machine::Launch& l) {
  const uint64_t threads = uint64_t{l.block.x} * l.block.y * l.block.z;
  if (threads == 0 || threads > kThreadsMax || l.block.z > 64) {
    return absl::StrCat("a block of ", l.block.x, " x ", l.block.y, " x ", l.block.z,
                        " threads; there may be 1 to ", kThreadsMax, ", 64 along z");
  }
  if (l.grid.x > 0x7fffffffu || l.grid.y > 0xffffu || l.grid.z > 0xffffu) {
    return absl::StrCat("a grid of ", l.grid.x, " x ", l.grid.y, " x ", l.grid.z,
                        " blocks; there may be 2147483647 x 65535 x 65535");
  }
  if (l.shared_bytes > kSharedBytesMax) {
    return absl::StrCat(l.shared_bytes, " bytes of shared memory; a block has ", kSharedBytesMax);
  }
  return "";
}

std::string Machine::Run(const Launch& launch) {
  if (std::string error = Limits(launch); !error.empty()) return error;
  launch_ = launch;
  num_threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  indices_.clear();
  for (unsigned z = 0; z < launch.block.z; ++z) {
    for (unsigned y = 0; y < launch.block.y; ++y) {
      for (unsigned x = 0; x < launch.block.x; ++x) indices_.push_back({x, y, z});
    }
  }
  dynamic_ = std::make_unique<SharedMemory>(launch.shared_bytes);
  error_.clear();
  Machine* const outer = current;
  current = this;
  blockDim = launch.block;
  gridDim = launch.grid;
  uint3& b = block_index_;
  for (b.z = 0; b.z < launch.grid.z && error_.empty(); ++b.z) {
    for (b.y = 0; b.y < launch.grid.y && error_.empty(); ++b.y) {
      for (b.x = launch.first_block; b.x < launch.grid.x && error_.empty(); ++b.x) RunBlock();
    }
  }
  current = outer;
  if (!error_.empty()) AbandonFibers();
  return error_;
}

void Machine::AbandonFibers() {
  idle_.clear();
  for (const auto& fiber : fibers_) AddIdle(*fiber);
}

void Machine::AddIdle(Fiber& fiber) {
  fiber.Start([](void* machine) { static_cast<Machine*>(machine)->RunThreads(); }, this);
  idle_.push_back(&fiber);
}

void Machine::RunBlock() {
  blockIdx = block_index_;
  threads_.assign(num_threads_, Thread());
  meetings_.clear();
  dynamic_->Poison();
  ++block_count_;
  ++num_blocks;
  static_bytes_ = 0;
  next_turn_ = num_done_ = num_at_barrier_ = 0;
  while (num_done_ < num_threads_) {
    bool progress = false;
    for (int first = 0; first < num_threads_; first += kWarpSize) {
      while (WarpTurn(first)) progress = true;
      if (!error_.empty()) return;
    }
    if (!progress) {
      error_ = absl::StrCat(Where(), WhyNobodyCanGoOn());
      return;
    }
  }
}

// Every lane has one turn; false when none can go on. The warp has turns as long as it can: it gets
// as far ahead of the others as a barrier lets it.
bool Machine::WarpTurn(int first) {
  bool progress = false;
  for (int turn = first; turn < std::min(first + kWarpSize, num_threads_); ++turn) {
    progress = Turn(InOrder(turn)) || progress;
    if (!error_.empty()) return false;
  }
  return progress;
}

// Lets a thread run until it waits or ends; false when it cannot.
bool Machine::Turn(int thread) {
  Thread& t = threads_[thread];
  if (t.state == State::kWaiting && t.ready(t.ready_arg)) t.state = State::kReady;
  if (t.state == State::kUnstarted) {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(fibers_.size()));
      AddIdle(*fibers_.back());
    }
    t.fiber = idle_.back();
    idle_.pop_back();
    ++next_turn_;
  } else if (t.state != State::kReady) {
    return false;
  }
  t.state = State::kReady;
  running_ = thread;
  SetIndices(thread);
  t.fiber->Resume();
  return true;
}

// A fiber's life. A thread that never waits leaves its fiber to the next one that has not started,
// without a switch.
void Machine::RunThreads() {
  while (true) {
    launch_.kernel(launch_.call);
    Thread& t = threads_[running_];
    Fiber* const fiber = t.fiber;
    t.state = State::kDone;
    ++num_done_;
    if (num_done_ == next_turn_ && next_turn_ < num_threads_) {
      running_ = InOrder(next_turn_++);
      threads_[running_].fiber = fiber;
      threads_[running_].state = State::kReady;
      SetIndices(running_);
    } else {
      idle_.push_back(fiber);
      fiber->Suspend();
    }
  }
}

// Not inlined: a fiber may wake on another OS thread, where thread_local variables lie elsewhere.
[[gnu::noinline]] void Machine::SetIndices(int thread) { threadIdx = indices_[thread]; }

void Machine::Suspend(State state, Site site) {
  Thread& t = threads_[running_];
  t.state = state;
  t.site = site;
  t.fiber->Suspend();
}

void Machine::SyncBlock(Site site) {
  if (num_at_barrier_ == 0) barrier_ = site;
  if (!Same(barrier_, site)) {
    std::string what =
        absl::StrCat("comes to this barrier, ", num_at_barrier_, " threads wait at another, ");
    what += Text(barrier_);
    Fail(std::move(what), site);
  }
  if (++num_at_barrier_ < num_threads_) return Suspend(State::kAtBarrier, site);
  num_at_barrier_ = 0;
  for (Thread& t : threads_) t.state = State::kReady;
}

void Machine::WaitUntil(bool (*ready)(const void*), const void* arg, Site site) {
  if (ready(arg)) return;
  threads_[running_].ready = ready;
  threads_[running_].ready_arg = arg;
  Suspend(State::kWaiting, site);
}

void Machine::Meet(int first, int count, unsigned mask, void* mine, CollectiveBody body,
                   Site site) {
  const int place = running_ - first;
  if (place < kWarpSize && (mask >> place & 1) == 0) {
    Fail(absl::StrCat("lane ", place, " is not in its own mask 0x", absl::Hex(mask)), site);
  }
  auto meeting = std::find_if(meetings_.begin(), meetings_.end(), [&](const Meeting& m) {
    return m.first == first && m.count == count && m.mask == mask;
  });
  if (meeting == meetings_.end()) {
    const int members = count == kWarpSize ? __builtin_popcount(mask) : count;
    meetings_.push_back({first, count, mask, body, site, members, {}});
    meeting = meetings_.end() - 1;
  }
  if (meeting->body != body || !Same(meeting->site, site)) {
    std::string what =
        absl::StrCat("comes here, others of its mask 0x", absl::Hex(mask), " wait at ");
    what += Text(meeting->site);
    Fail(std::move(what), site);
  }
  meeting->threads[place] = mine;
  if (--meeting->missing > 0) return Suspend(State::kAtMeeting, site);
  const Meeting complete = *meeting;
  *meeting = meetings_.back();
  meetings_.pop_back();
  threads_[running_].site = site;
  body(complete.threads, mask);
  for (int i = 0; i < count; ++i) {
    if (complete.threads[i] != nullptr) threads_[first + i].state = State::kReady;
  }
}

// What lies on this fiber is never destroyed: `what` gives its memory back here.
void Machine::Fail(std::string&& what, Site site) {
  if (site.file == nullptr) site = threads_[running_].site;
  error_ = absl::StrCat(Where(), "thread ", running_, " at ", Text(site), ": ", what);
  std::string().swap(what);
  while (true) threads_[running_].fiber->Suspend();
}

void* Machine::SharedBytes(const void* declaration, size_t bytes) {
  auto variable = std::find_if(variables_.begin(), variables_.end(),
                               [&](const Variable& v) { return v.declaration == declaration; });
  if (variable == variables_.end()) {
    variables_.push_back({declaration, std::make_unique<SharedMemory>(bytes), 0});
    variable = variables_.end() - 1;
  }
  UPIPE_CHECK(variable->memory->bytes() == bytes);
  if (variable->block != block_count_) {
    variable->block = block_count_;
    variable->memory->Poison();
    static_bytes_ += bytes;
    if (static_bytes_ > kStaticSharedBytesMax ||
        static_bytes_ + launch_.shared_bytes > kSharedBytesMax) {
      Fail(absl::StrCat(static_bytes_, " bytes of shared variables and ", launch_.shared_bytes,
                        " given at launch; there may be ", kStaticSharedBytesMax, " and ",
                        kSharedBytesMax, " in all"),
           {"launch", 0});
    }
  }
  return variable->memory->data();
}

std::string Machine::Where() const {
  return absl::StrCat("block (", block_index_.x, ", ", block_index_.y, ", ", block_index_.z, "): ");
}

std::string Machine::WhyNobodyCanGoOn() const {
  std::string text = "no thread can go on";
  const auto describe = [&](State state, const char* what) {
    std::vector<bool> told(num_threads_);
    for (int i = 0; i < num_threads_; ++i) {
      if (threads_[i].state != state || told[i]) continue;
      const auto here = [&](int k) {
        return threads_[k].state == state &&
               (state == State::kDone || Same(threads_[k].site, threads_[i].site));
      };
      absl::StrAppend(&text, "; ", Ranges(num_threads_, here), " ", what);
      if (state != State::kDone) absl::StrAppend(&text, " ", Text(threads_[i].site));
      for (int k = i; k < num_threads_; ++k) told[k] = told[k] || here(k);
    }
  };
  describe(State::kAtBarrier, "wait at the barrier");
  describe(State::kAtMeeting, "wait for others of their mask at");
  describe(State::kWaiting, "wait for a condition at");
  describe(State::kDone, "have left the kernel");
  return text;
}

// Machines that run nothing: fibers are slow to make.
class MachinePool {
 public:
  std::unique_ptr<Machine> Take() {
    const std::lock_guard lock(mutex_);
    if (machines_.empty()) return std::make_unique<Machine>();
    std::unique_ptr<Machine> machine = std::move(machines_.back());
    machines_.pop_back();
    return machine;
  }
  void Return(std::unique_ptr<Machine> machine) {
    const std::lock_guard lock(mutex_);
    machines_.push_back(std::move(machine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Machine>> machines_;
};

MachinePool& Machines() {
  static MachinePool& pool = *new MachinePool();
  return pool;
}

Machine& Current() {
  UPIPE_CHECK(current != nullptr) << "called outside a kernel";
  return *current;
}

}  // namespace

void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
             void (*kernel)(const void* call), const void* call) {
  if (!stream->error.empty()) return;
  std::unique_ptr<Machine> machine = Machines().Take();
  const unsigned first = grid.x - std::min(grid.x, stream->last_blocks.value_or(grid.x));
  stream->error = machine->Run({grid, block, shared_bytes, stream->order, first, kernel, call});
  Machines().Return(std::move(machine));
}

int ThreadIndex() { return Current().thread(); }
int64_t BlockSerial() { return num_blocks; }
void SyncBlock(Site site) { Current().SyncBlock(site); }
void WaitUntil(bool (*ready)(const void* arg), const void* arg, Site site) {
  Current().WaitUntil(ready, arg, site);
}
void Fail(const char* what, Site site) { Current().Fail(what, site); }
void Meet(int first_thread, int num_threads, unsigned mask, void* mine, CollectiveBody body,
          Site site) {
  Current().Meet(first_thread, num_threads, mask, mine, body, site);
}
void* DynamicSharedBytes() { return Current().DynamicSharedBytes(); }
void* SharedBytes(const void* declaration, size_t bytes) {
  return Current().SharedBytes(declaration, bytes);
}

}  // namespace upipe::cuda_emulator
