// Blocks, their threads and barriers; see emulator.h.

#include "emulator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string_view>
#include <vector>

#include "fiber.h"
#include "warp.h"

// Shared memory, by the names that declarations inside of functions of these namespaces give it.
// Behind the largest block's are some bytes that no block may touch.
#define HIDDEN __attribute__((visibility("hidden")))
extern "C" {
HIDDEN alignas(emulation::kPage) unsigned char resode_shared[emulation::kMaxShared + 1024];
#define ALIAS HIDDEN __attribute__((alias("resode_shared")))
extern ALIAS unsigned char _ZN6resode13resode_sharedE[];
extern ALIAS unsigned char _ZN6resode12_GLOBAL__N_113resode_sharedE[];
extern ALIAS unsigned char _ZN12_GLOBAL__N_113resode_sharedE[];
}

#if defined(__x86_64__)
asm(R"(
    .text
    .type emulation_switch, @function
    .hidden emulation_switch
    .globl emulation_switch
emulation_switch:
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
    .size emulation_switch, . - emulation_switch
)");
#endif

namespace emulation {

Here here;

namespace {

struct Thread;

// Where a number of threads meet. The meetings alternate between two tags: a thread that is on its
// way to the next meeting must not seem to be ordered with one that still leaves this one.
struct Barrier {
  std::vector<Thread*> waiting;
  size_t expected = 0;
  bool odd = false;
  char tags[2];

  void expect(size_t threads) {
    expected = threads;
    waiting.reserve(threads);
  }
};

struct Warp : Barrier {
  Lane lanes[kWarp];
};

struct Thread {
  Fiber& fiber;
  uint3 index;
  Warp& warp;
  int lane;
  bool returned = false;
  Place place = {};  // where it waits
  std::vector<Copy> copies = {};
  size_t copied = 0;  // how many of them have been made
  int groups = 0;     // committed ones
};

// The order in which blocks, and threads that may go on, get their turn.
class Order {
 public:
  Order() {
    const char* name = std::getenv("RESODE_EMULATION_ORDER");
    name_ = name ? name : "forward";
    known_ = name_ == "forward" || name_ == "reverse" || name_ == "shuffle";
  }
  bool known() const { return known_; }

  template <class Iterator>
  void arrange(Iterator begin, Iterator end) {
    if (name_ == "reverse") std::reverse(begin, end);
    if (name_ == "shuffle") std::shuffle(begin, end, random_);
  }

 private:
  std::string_view name_;
  bool known_;
  std::minstd_rand random_;
};

struct Block {
  Block(const Kernel& kernel, Order& order, Fibers& fibers, dim3 size);

  std::string run();
  void next(bool last = false);
  void meet(Barrier& barrier, Place place, Together together);
  std::string describe_waiting() const;

  const Kernel& kernel;
  Order& order;
  Fiber host;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  std::vector<Thread*> ready;  // the next one is the last
  Thread* current = nullptr;
  std::string error;
};

Block* running;
size_t shared_bytes;
char begin_of_launch, end_of_launch;  // tags

bool same(Place a, Place b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || std::string_view(a.file_name()) == b.file_name());
}

std::string text(Place place) {
  std::string_view file = place.file_name();
  return std::string(file.substr(file.rfind('/') + 1)) + ":" + std::to_string(place.line());
}

std::string text(uint3 index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

void run_thread() {
  running->current->fiber.arrive();
  acquire(&begin_of_launch);
  running->kernel.call(running->kernel);
  running->current->returned = true;
  release(&end_of_launch);
  running->next(true);
}

Block::Block(const Kernel& kernel, Order& order, Fibers& fibers, dim3 size)
    : kernel(kernel), order(order) {
  size_t count = size.x * size.y * size.z;
  warps.resize((count + kWarp - 1) / kWarp);
  barrier.expect(count);
  threads.reserve(count);
  size_t first = fibers.take(count);
  for (size_t i = 0; i < count; ++i) {
    uint3 index{unsigned(i) % size.x, unsigned(i) / size.x % size.y, unsigned(i) / size.x / size.y};
    Warp& warp = warps[i / kWarp];
    if (i % kWarp == 0) warp.expect(std::min<size_t>(kWarp, count - i));
    Fiber& fiber = fibers[first + i];
    fiber.prepare(run_thread, "block " + text(here.block) + ", thread " + text(index));
    threads.push_back({fiber, index, warp, int(i % kWarp)});
  }
  ready.reserve(count);
  for (Thread& thread : threads) ready.push_back(&thread);
  order.arrange(ready.begin(), ready.end());
  std::reverse(ready.begin(), ready.end());
}

std::string Block::run() {
  next();
  if (error.empty() && !std::all_of(threads.begin(), threads.end(),
                                    [](const Thread& thread) { return thread.returned; }))
    error = "not all threads reach a barrier: " + describe_waiting();
  return error.empty() ? error : "block " + text(here.block) + ": " + error;
}

// Goes on with another thread, or with the host when none is ready.
void Block::next(bool last) {
  Fiber& from = current ? current->fiber : host;
  if (ready.empty()) {
    current = nullptr;
    from.switch_to(host, last);
  } else {
    current = ready.back();
    ready.pop_back();
    here.thread = current->index;
    from.switch_to(current->fiber, last);
  }
}

// Waits for the others. The last one to come does what they came for.
void Block::meet(Barrier& barrier, Place place, Together together) {
  Thread& self = *current;
  self.place = place;
  if (!barrier.waiting.empty()) {
    Place other = barrier.waiting.front()->place;
    if (!same(place, other))
      fail("threads meet at different places: " + text(other) + " and " + text(place));
  }
  barrier.waiting.push_back(&self);
  if (barrier.waiting.size() < barrier.expected) return next();
  if (together) together(self.warp.lanes, int(barrier.expected));
  barrier.waiting.pop_back();
  order.arrange(barrier.waiting.begin(), barrier.waiting.end());
  ready.insert(ready.end(), barrier.waiting.rbegin(), barrier.waiting.rend());
  barrier.waiting.clear();
  barrier.odd = !barrier.odd;
}

std::string Block::describe_waiting() const {
  std::map<std::string, int> counts;
  for (const Thread& thread : threads)
    ++counts[thread.returned ? "have returned" : "wait at " + text(thread.place)];
  std::string list;
  for (const auto& [state, count] : counts)
    list += (list.empty() ? "" : ", ") + std::to_string(count) + " " + state;
  return list;
}

// A meeting after which every thread sees the memory that the others wrote before.
void synchronize(Barrier& barrier, Place place) {
  char* tag = &barrier.tags[barrier.odd];
  release(tag);
  running->meet(barrier, place, nullptr);
  acquire(tag);
}

void check_mask(unsigned mask) {
  Warp& warp = running->current->warp;
  unsigned lanes = 0xffffffffu >> (kWarp - warp.expected);
  if ((mask & lanes) != lanes) fail("masks that leave out lanes are not emulated");
}

// The block's shared memory: NaNs, and nothing behind it.
void renew_shared() {
  if (races_are_watched()) renew(resode_shared, (shared_bytes / kPage + 1) * kPage);
  if (__asan_unpoison_memory_region) {
    __asan_unpoison_memory_region(resode_shared, sizeof(resode_shared));
    __asan_poison_memory_region(resode_shared + shared_bytes, sizeof(resode_shared) - shared_bytes);
  }
  std::memset(resode_shared, 0xff, shared_bytes);
}

// Ends a block. Its threads allocated memory that the host frees, although nothing orders them
// with it before the launch ends.
void destroy(std::unique_ptr<Block> block) {
  if (races_are_watched()) AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  block.reset();
  if (races_are_watched()) AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}

std::map<const void*, size_t>& allowed_shared() {
  static std::map<const void*, size_t> allowed;
  return allowed;
}

std::string check_launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared) {
  auto found = allowed_shared().find(kernel.name);
  size_t allowed = std::max(found == allowed_shared().end() ? 0 : found->second, kDefaultShared);
  if (shared > allowed)
    return std::to_string(shared) + " bytes of shared memory, where " + std::to_string(allowed) +
           " are allowed";
  if (!(grid.x && grid.y && grid.z && block.x && block.y && block.z)) return "an empty grid";
  if (grid.y > 65535 || grid.z > 65535 || grid.x > 0x7fffffffu) return "too large a grid";
  if (uint64_t(block.x) * block.y * block.z > kMaxThreads || block.z > 64)
    return "more than " + std::to_string(kMaxThreads) + " threads";
  return "";
}

std::mutex one_launch;

}  // namespace

void fail(const std::string& message) {
  running->error = "thread " + text(here.thread) + ": " + message;
  running->ready.clear();
  running->next(true);
  std::abort();  // no one comes back
}

void sync_block(Place place) { synchronize(running->barrier, place); }

void sync_warp(unsigned mask, Place place) {
  check_mask(mask);
  synchronize(running->current->warp, place);
}

void meet_in_warp(unsigned mask, Lane& mine, Together together, Place place) {
  check_mask(mask);
  Thread& self = *running->current;
  Lane& lane = self.warp.lanes[self.lane];
  lane = mine;
  lane.index = self.lane;
  running->meet(self.warp, place, together);
  mine = lane;
}

bool in_shared(const void* address, size_t bytes) {
  const unsigned char* begin = static_cast<const unsigned char*>(address);
  return begin >= resode_shared && begin + bytes <= resode_shared + shared_bytes;
}

void copy_later(void* to, const void* from, size_t bytes) {
  for (const void* address : {static_cast<const void*>(to), from})
    if (reinterpret_cast<uintptr_t>(address) % bytes) fail("an asynchronous copy is not aligned");
  if (!in_shared(to, bytes)) fail("an asynchronous copy to memory that is not the block's");
  Thread& self = *running->current;
  self.copies.push_back({to, from, bytes, self.groups});
}

void commit_copies() { ++running->current->groups; }

bool copy_due(int prior, Copy& copy) {
  Thread& self = *running->current;
  if (self.copied < self.copies.size()) {
    copy = self.copies[self.copied];
    if (copy.group < self.groups - prior) {
      ++self.copied;
      return true;
    }
  } else {
    self.copies.clear();
    self.copied = 0;
  }
  return false;
}

std::string launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared) {
  std::lock_guard lock(one_launch);
  static Fibers fibers;
  Order order;
  if (!order.known()) return "RESODE_EMULATION_ORDER is forward, reverse or shuffle";
  std::string error = check_launch(kernel, grid, block, shared);
  if (!error.empty()) return error;
  shared_bytes = shared;
  here.block_size = block;
  here.grid_size = grid;
  std::vector<uint64_t> blocks(uint64_t(grid.x) * grid.y * grid.z);
  for (uint64_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  order.arrange(blocks.begin(), blocks.end());
  for (uint64_t i : blocks) {
    here.block = {unsigned(i % grid.x), unsigned(i / grid.x % grid.y),
                  unsigned(i / grid.x / grid.y)};
    renew_shared();
    release(&begin_of_launch);
    auto state = std::make_unique<Block>(kernel, order, fibers, block);
    running = state.get();
    error = state->run();
    destroy(std::move(state));
    if (error.empty()) continue;
    fibers = {};  // some were left in the middle
    break;
  }
  acquire(&end_of_launch);
  return error;
}

void allow_shared(const void* kernel, size_t bytes) {
  std::lock_guard lock(one_launch);
  allowed_shared()[kernel] = bytes;
}

}  // namespace emulation
