// A stack of its own to run on: switching to and from it costs a few nanoseconds and is known to
// AddressSanitizer.
#pragma once

#include <cstddef>

namespace upipe::cuda_emulator {

class Fiber {
 public:
  // Fibers that live together have different indices.
  explicit Fiber(size_t index);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next Resume runs body(arg) on the fiber, whatever it was in the middle of. Body must not
  // return.
  void Start(void (*body)(void* arg), void* arg);
  // Called by the owner: runs the fiber until it suspends itself.
  void Resume();
  // Called on the fiber: back to who resumed it.
  void Suspend();

 private:
  static void Enter(Fiber* fiber);

  char* stack_;  // lowest page forbidden
  const size_t top_bytes_;
  void* stack_pointer_ = nullptr;
  void* owner_stack_pointer_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* arg_ = nullptr;
  // AddressSanitizer's.
  void* fake_stack_ = nullptr;
  void* owner_fake_stack_ = nullptr;
  const void* owner_stack_ = nullptr;
  size_t owner_stack_bytes_ = 0;
};

}  // namespace upipe::cuda_emulator
