#include "tests/support/cuda_emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "common/check.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace upipe::cuda_emulator {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr size_t kStackBytes = 256 * 1024;
// Stacks that all began at the same offset in their pages would share few lines of the caches.
constexpr size_t kColours = 61;
constexpr size_t kColourBytes = 320;

}  // namespace

#if !defined(__x86_64__)
#error "the switch of stacks is written for x86-64"
#endif

// switch_stack saves the registers that a function must keep on the present stack, and its pointer
// in *save, and goes on where `load` was saved. first_return is where a new stack goes on: its
// fiber and the function to enter it by are in registers.
extern "C" void upipe_cuda_emulator_switch_stack(void** save, void* load);
asm(R"(
.text
.globl upipe_cuda_emulator_switch_stack
.hidden upipe_cuda_emulator_switch_stack
.type upipe_cuda_emulator_switch_stack, @function
upipe_cuda_emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size upipe_cuda_emulator_switch_stack, . - upipe_cuda_emulator_switch_stack

.globl upipe_cuda_emulator_first_return
.hidden upipe_cuda_emulator_first_return
.type upipe_cuda_emulator_first_return, @function
upipe_cuda_emulator_first_return:
  movq %r12, %rdi
  callq *%r13
  ud2
.size upipe_cuda_emulator_first_return, . - upipe_cuda_emulator_first_return
)");
extern "C" void upipe_cuda_emulator_first_return();

Fiber::Fiber(size_t index) : top_bytes_(index % kColours * kColourBytes) {
  void* stack = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  UPIPE_CHECK(stack != MAP_FAILED) << "no address space for a stack of " << kStackBytes << " bytes";
  stack_ = static_cast<char*>(stack);
  UPIPE_CHECK(mprotect(stack_, kGuardBytes, PROT_NONE) == 0);
}

Fiber::~Fiber() { munmap(stack_, kGuardBytes + kStackBytes); }

void Fiber::Start(void (*body)(void* arg), void* arg) {
  body_ = body;
  arg_ = arg;
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(stack_ + kGuardBytes, kStackBytes);
  fake_stack_ = nullptr;
#endif
  // r15, r14, r13, r12, rbx, rbp, the address to return to, and two words that align the stack.
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kGuardBytes + kStackBytes - top_bytes_) - 9;
  top[0] = top[1] = top[4] = top[5] = 0;
  top[2] = reinterpret_cast<uint64_t>(&Fiber::Enter);
  top[3] = reinterpret_cast<uint64_t>(this);
  top[6] = reinterpret_cast<uint64_t>(&upipe_cuda_emulator_first_return);
  stack_pointer_ = top;
}

void Fiber::Enter(Fiber* fiber) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &fiber->owner_stack_, &fiber->owner_stack_bytes_);
#endif
  fiber->body_(fiber->arg_);
}

void Fiber::Resume() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&owner_fake_stack_, stack_ + kGuardBytes, kStackBytes);
#endif
  upipe_cuda_emulator_switch_stack(&owner_stack_pointer_, stack_pointer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(owner_fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::Suspend() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&fake_stack_, owner_stack_, owner_stack_bytes_);
#endif
  upipe_cuda_emulator_switch_stack(&stack_pointer_, owner_stack_pointer_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack_, &owner_stack_, &owner_stack_bytes_);
#endif
}

}  // namespace upipe::cuda_emulator
