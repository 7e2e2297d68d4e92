// Runs CUDA kernels on a CPU, so that tests execute them where there is no GPU. The headers of this
// folder stand in for CUDA's; what they share is here.
//
// The blocks of a launch run one after another on the calling thread. The threads of a block are
// fibers, which change places only where they wait for one another: a run is deterministic, and a
// barrier that some threads never reach is an error instead of a hang. The emulation is stricter
// than a GPU where that finds mistakes: shared memory starts as NaNs, an asynchronous copy happens
// as late as it may, and RESODE_EMULATION_ORDER=reverse or shuffle changes the order of blocks and
// threads, which no result may depend on.
//
// Under ThreadSanitizer every fiber is a thread of its own. Barriers order the threads that meet
// there, and the launch's begin and end order all of them with the caller; nothing else does, so
// that a missing barrier is a race wherever it could matter on a GPU. Shuffles, mma and ldmatrix
// order no memory, as on a GPU. For this the sources of the emulator are compiled without
// sanitizers, and the code of these headers, which kernels inline, touches none of its memory.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {

using Place = std::source_location;

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxShared = 227 * 1024;     // bytes of shared memory that a block may have,
constexpr size_t kDefaultShared = 48 * 1024;  // and that it may have without asking

// Where the running thread is.
struct Here {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Here here;

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& message);

void sync_block(Place place);
void sync_warp(unsigned mask, Place place);

// The value of the lane `source` of the warp.
uint32_t shuffle(unsigned mask, uint32_t value, int source, Place place);

// ldmatrix: of the rows whose addresses the lanes give, those that this lane gets numbers from: for
// each of the four matrices one, or two if it is transposed.
std::array<const uint16_t*, 8> matrix_rows(const void* row, bool transposed, Place place);

// d += a b, in fragments as mma.sync has them.
enum class Product { f16, bf16, tf32 };
void mma(Product product, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         Place place);

// The thread's asynchronous copies, in groups. `copy_due` names the next one that must be done
// before all but the latest `prior` groups are.
struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  int group;
};
void copy_later(void* to, const void* from, size_t bytes);
void commit_copies();
bool copy_due(int prior, Copy& copy);

// A kernel with its arguments, as the threads call it.
struct Kernel {
  const void* name;
  void (*call)(const Kernel&);
  void** arguments;
};

// Returns what went wrong, or nothing.
std::string launch(const Kernel& kernel, dim3 grid, dim3 block, size_t shared);

// How much shared memory the kernel's launches may ask for.
void allow_shared(const void* kernel, size_t bytes);

}  // namespace emulation
