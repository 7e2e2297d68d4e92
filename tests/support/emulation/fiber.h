// Fibers: stacks of their own that one thread switches between, as sanitizers know them.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

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
WEAK void __tsan_set_fiber_name(void* fiber, const char* name);
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

#if defined(__x86_64__)
// Keeps the registers that a call must keep on the stack, and goes on where `to` was left.
extern "C" void emulation_switch(void** from, void* to);
#endif

class Fiber {
 public:
  // The one that is running.
  Fiber() : watched_(races_are_watched() ? __tsan_get_current_fiber() : nullptr) {}

  // One on a stack of its own, below which is a page that no one may touch.
  explicit Fiber(size_t bytes) : size_(bytes), owned_(true) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kPage + bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kPage, PROT_NONE) != 0) std::abort();
    bottom_ = static_cast<char*>(memory) + kPage;
    if (races_are_watched()) watched_ = __tsan_create_fiber(0);
  }
  Fiber(const Fiber&) = delete;
  ~Fiber() {
    if (!owned_) return;
    if (watched_) {
      // What it did happened before; the switch back says so.
      void* running = __tsan_get_current_fiber();
      __tsan_switch_to_fiber(watched_, kNoSync);
      __tsan_switch_to_fiber(running, 0);
      __tsan_destroy_fiber(watched_);
    }
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(bottom_, size_);
    munmap(bottom_ - kPage, kPage + size_);
  }

  // Makes it call `enter`, which must not return, when it is switched to. Reports will name it.
  void prepare(void (*enter)(), const std::string& name) {
    if (watched_) __tsan_set_fiber_name(watched_, name.c_str());
#if defined(__x86_64__)
    // Six registers, the address to return to, and the one that `enter` would return to.
    void** top = reinterpret_cast<void**>(bottom_ + size_) - 2;
    top[0] = reinterpret_cast<void*>(enter);
    top[1] = nullptr;
    context_ = top - 6;
    for (int i = 0; i < 6; ++i) top[i - 6] = nullptr;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom_;
    context_.uc_stack.ss_size = size_;
    makecontext(&context_, enter, 0);
#endif
    fake_stack_ = nullptr;
  }

  // Goes on with another fiber until one comes back to this, which none does for the `last` time.
  void switch_to(Fiber& to, bool last = false) {
    if (__sanitizer_start_switch_fiber)
      __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack_, to.bottom_, to.size_);
    if (watched_) __tsan_switch_to_fiber(to.watched_, kNoSync);
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
    if (!__sanitizer_finish_switch_fiber) return;
    const void* bottom;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &previous->size_);
    previous->bottom_ = static_cast<char*>(const_cast<void*>(bottom));
  }

 private:
  // The order in which fibers happen to run orders nothing.
  static constexpr unsigned kNoSync = 1;
  static inline Fiber* previous;
  char* bottom_ = nullptr;
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

// The fibers that blocks run on, one after another. ThreadSanitizer takes blocks on the same fibers
// for ordered, and a millisecond to make one: its fibers come round again after some blocks.
class Fibers {
 public:
  // The first of `count` fibers to be used next.
  size_t take(size_t count) {
    size_t round = races_are_watched() ? std::max<size_t>(1024, 2 * count) : count;
    size_t first = next_ + count <= round ? next_ : 0;
    next_ = first + count;
    while (fibers_.size() < next_) fibers_.push_back(std::make_unique<Fiber>(kStack));
    return first;
  }
  Fiber& operator[](size_t i) { return *fibers_[i]; }

 private:
  static constexpr size_t kStack = 256 * 1024;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  size_t next_ = 0;
};

}  // namespace emulation
