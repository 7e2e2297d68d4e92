// Fibers: stacks of their own that one thread switches between, as sanitizers know them.

#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// The sanitizers' interface; null without them.
extern "C" {
#define WEAK __attribute__((weak))
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void* fiber);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_acquire(void* address);
WEAK void __tsan_release(void* address);
WEAK void AnnotateIgnoreWritesBegin(const char* file, int line);
WEAK void AnnotateIgnoreWritesEnd(const char* file, int line);
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
WEAK void __asan_poison_memory_region(const volatile void* address, size_t size);
WEAK void __asan_unpoison_memory_region(const volatile void* address, size_t size);
#undef WEAK
}

namespace emulation {

constexpr size_t kPage = 4096;

inline bool races_are_watched() { return __tsan_create_fiber != nullptr; }

// What happened before a release happens before an acquire of the same tag.
inline void acquire(void* tag) {
  if (races_are_watched()) __tsan_acquire(tag);
}
inline void release(void* tag) {
  if (races_are_watched()) __tsan_release(tag);
}

// Replaces pages by new ones, whose past ThreadSanitizer forgets.
inline void renew(void* pages, size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  if (mmap(pages, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) std::abort();
}

// Stacks with a page before each that no one may touch, reused by block after block.
class Stacks {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  explicit Stacks(int count) : count_(count) {
    void* memory = mmap(nullptr, count * kStride, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    base_ = static_cast<char*>(memory);
    for (int i = 0; i < count; ++i) mprotect((*this)[i], kBytes, PROT_READ | PROT_WRITE);
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(base_, count_ * kStride); }

  char* operator[](int i) { return base_ + i * kStride + kPage; }

 private:
  static constexpr size_t kStride = kPage + kBytes;
  int count_;
  char* base_;
};

#if defined(__x86_64__)
// Keeps the registers that a call must keep on the stack, and goes on where `to` was left.
extern "C" void emulation_switch(void** from, void* to);
#endif

class Fiber {
 public:
  // The one that is running.
  Fiber() : watched_(races_are_watched() ? __tsan_get_current_fiber() : nullptr) {}

  // One that will call `enter`, which must not return.
  Fiber(char* stack, void (*enter)()) : bottom_(stack), size_(Stacks::kBytes), owned_(true) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(stack, Stacks::kBytes);
    if (races_are_watched()) {
      renew(stack, Stacks::kBytes);
      watched_ = __tsan_create_fiber(0);
    }
#if defined(__x86_64__)
    // Six registers, the address to return to, and the one that `enter` would return to.
    void** top = reinterpret_cast<void**>(stack + Stacks::kBytes) - 2;
    top[0] = reinterpret_cast<void*>(enter);
    top[1] = nullptr;
    context_ = top - 6;
    for (int i = 0; i < 6; ++i) top[i - 6] = nullptr;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = Stacks::kBytes;
    makecontext(&context_, enter, 0);
#endif
  }
  Fiber(const Fiber&) = delete;
  ~Fiber() {
    if (owned_ && watched_) __tsan_destroy_fiber(watched_);
  }

  // Goes on with another fiber until one comes back to this, which none does for the `last` time.
  void switch_to(Fiber& to, bool last = false) {
    if (__sanitizer_start_switch_fiber)
      __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, to.bottom_, to.size_);
    if (watched_) {
      constexpr unsigned no_sync = 1;  // the order in which fibers happen to run orders nothing
      __tsan_switch_to_fiber(to.watched_, no_sync);
    }
    previous = this;
#if defined(__x86_64__)
    emulation_switch(&context_, to.context_);
#else
    swapcontext(&context_, &to.context_);
#endif
    arrive();
  }

  // To be called at the start of a fiber.
  void arrive() {
    if (__sanitizer_finish_switch_fiber)
      __sanitizer_finish_switch_fiber(fake_stack_, &previous->bottom_, &previous->size_);
  }

 private:
  static inline Fiber* previous;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  bool owned_ = false;
  void* fake_stack_ = nullptr;
  void* watched_ = nullptr;
#if defined(__x86_64__)
  void* context_ = nullptr;
#else
  ucontext_t context_;
#endif
};

}  // namespace emulation
