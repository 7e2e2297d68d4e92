// Calls the CPU kernels with random problems, valid and not, in buffers of exactly the bytes that
// they say. To be built with sanitizers (tests/sanitize.sh fuzz), which find every access beyond a
// buffer.
//
//     fuzz CALLS SEED    that many calls: a forward and a reverse pass, or an increment alone
//     fuzz 1 SEED        repeats the call that a failure has named
//
// A call is made of its seed alone. Half of the problems are valid: they must run, with results
// that are finite. In the other half a number or a buffer's bytes are changed: they must be
// refused, or run within their buffers. Some passes are stopped early, which must not block.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>

#include <sanitizer/common_interface_defs.h>

#include "../../csrc/builds.h"
#include "../../csrc/checks.h"

using namespace resode;

namespace {

struct Random {
  std::mt19937_64 engine;

  int64_t from(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(engine);
  }
  bool chance(int of) { return from(1, of) == 1; }
  template <class T>
  T any(std::initializer_list<T> values) {
    return values.begin()[from(0, int64_t(values.size()) - 1)];
  }
};

uint64_t current = 0;  // the seed of the call in work
void say_seed() { std::printf("failed: to repeat it, give 1 %" PRIu64 "\n", current); }

using Buffer = std::unique_ptr<char, void (*)(void*)>;

struct Call {
  Random random;
  Stage s{};
  std::vector<int> bits;  // of the stage
  std::vector<Buffer> buffers;
  std::vector<Memory> parameters;
  ForwardMemory forward{};
  ReverseMemory reverse{};
  bool valid = true;

  explicit Call(uint64_t seed) : random{std::mt19937_64(seed)} {}

  // Of random numbers around zero, so small that no stage of these depths overflows.
  Memory make(int64_t count, DType type, double size = 0.1) {
    const int64_t bytes = count * bytes_of(type);
    char* const at = static_cast<char*>(std::malloc(bytes));
    buffers.emplace_back(at, &std::free);
    for (int64_t i = 0; i < count; ++i) {
      const float value = float(size * (double(random.from(-1000, 1000)) / 1000));
      if (type == DType::float64) {
        const double wide = value;
        std::memcpy(at + 8 * i, &wide, 8);
      } else if (type == DType::float32) {
        std::memcpy(at + 4 * i, &value, 4);
      } else {  // bfloat16 is the upper half; as float16 the same bits are another number
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const uint16_t half =
            type == DType::bfloat16 ? uint16_t(bits >> 16) : uint16_t(random.from(0, 0x2fff));
        std::memcpy(at + 2 * i, &half, 2);
      }
    }
    return {reinterpret_cast<uintptr_t>(at), size_t(bytes)};
  }
  Memory make_bytes(int64_t count) {
    char* const at = static_cast<char*>(std::malloc(count));
    buffers.emplace_back(at, &std::free);
    for (int64_t i = 0; i < count; ++i) at[i] = char(random.from(-128, 127));
    return {reinterpret_cast<uintptr_t>(at), size_t(count)};
  }
  Memory positive(int64_t count, DType type) {
    const Memory memory = make(count, type);
    for (int64_t i = 0; i < count; ++i) {  // 1, in every dtype
      const double d = 1;
      const float f = 1;
      const uint16_t h = type == DType::float16 ? 0x3c00 : 0x3f80;
      char* const at = pointer<char>(memory) + i * bytes_of(type);
      type == DType::float64   ? std::memcpy(at, &d, 8)
      : type == DType::float32 ? std::memcpy(at, &f, 4)
                               : std::memcpy(at, &h, 2);
    }
    return memory;
  }

  int any_bits() { return random.any({2, 3, 4, 5, 6, 8, 12, 16}); }

  void describe() {
    s.block = random.any({Block::mlp, Block::mlp, Block::linear, Block::conv});
    constexpr std::string_view names = kNames<Activation>;
    s.activation = Activation(random.from(1, std::count(names.begin(), names.end(), ',')));
    s.scheme = random.any({Scheme::euler, Scheme::heun});
    s.steps = random.from(1, 4);
    s.step = random.any({0.1, 0.25, -0.1});
    s.tied = random.chance(3);
    s.dim = random.from(1, 40);
    s.hidden = random.from(1, 40);
    s.rows = random.from(1, 40);
    s.height = s.width = 1;
    s.epsilon = 1e-2;
    s.stream = random.chance(3) ? DType::float64 : DType::float32;
    s.storage = s.stream == DType::float64
                    ? DType::float64
                    : random.any({DType::float32, DType::float16, DType::bfloat16});
    s.anchor_every = random.from(0, 3);
    reverse.reverse_rule = ReverseRule(random.from(s.anchor_every ? 0 : 1, 4));
    if (reverse.reverse_rule == ReverseRule::recorded)
      for (int64_t n = random.chance(2) ? 1 : s.steps; n > 0; --n)
        bits.push_back(random.chance(4) ? 0 : any_bits());
    s.threads = random.chance(8) ? int(random.from(2, 3)) : 1;  // several are slow on busy cores
    if (s.block != Block::conv) return;
    s.layers = int(random.from(2, 3));
    s.height = random.from(1, 5);
    s.width = random.from(1, 5);
    s.rows = random.from(2, 3) * s.height * s.width;
    s.dim = random.from(1, 20);
    int64_t channels = s.dim;
    for (int l = 0; l < s.layers; ++l) {
      const int64_t out = l + 1 == s.layers ? s.dim : random.from(1, 20);
      s.convolutions[l] = {channels, out, random.any<int64_t>({1, 3})};
      channels = out;
    }
  }

  void allocate() {
    const int64_t blocks = s.blocks(), state = s.rows * s.dim;
    const int count = s.block == Block::mlp ? 4 : s.block == Block::linear ? 1 : 5 * s.layers;
    const bool conv = s.block == Block::conv, wanted = !random.chance(4);
    for (int64_t n = 0; n < (conv ? blocks : 1); ++n) {
      bool batch = true;
      for (int k = 0; k < count; ++k) {
        const int64_t size = s.elements(k) * (conv ? 1 : blocks);
        if (conv && k % 5 == 3) batch = random.chance(2);
        const bool given = conv && k % 5 >= 3, optional = conv ? k % 5 != 0 : k % 2 == 1;
        const bool absent = given ? batch : optional && random.chance(4);
        parameters.push_back(absent  ? Memory{}
                             : given ? positive(size, s.storage)
                                     : make(size, s.storage));
        const bool gradient = !absent && !given && wanted && !random.chance(4);
        reverse.gradients.push_back(gradient ? make(size, s.storage) : Memory{});
      }
    }
    int64_t channels = 0;
    for (int l = 0; l < s.layers; ++l) channels += s.convolutions[l].out;
    const int64_t evaluations = s.evaluations();
    const bool kinked = s.block != Block::linear && s.activation == Activation::relu &&
                        reverse.reverse_rule != ReverseRule::exact && random.chance(2);
    int64_t anchors = s.anchor_every ? (s.steps - 1) / s.anchor_every : 0, codes = 0, scales = 0;
    give_bits();
    if (s.records()) {
      anchors = 0;
      for (int64_t n = 0; n < s.steps; ++n) {
        anchors += !s.bits_of(n);
        codes += s.rows * ((s.dim + 7) / 8) * s.bits_of(n);
        scales += s.bits_of(n) ? s.rows * ((s.dim + 31) / 32) : 0;
      }
    }
    forward = {
        make(state, s.stream),
        make(state, s.stream),
        make(anchors * state, s.stream),
        make_bytes(codes),
        make(scales, DType::bfloat16),
        kinked ? make_bytes(evaluations * s.rows * s.sign_bytes()) : Memory{},
        channels && random.chance(2) ? make(2 * channels * evaluations, s.stream) : Memory{}};
    reverse.order = int(random.from(1, 3));
    reverse.start = random.chance(2) ? forward.x : forward.y;
    reverse.anchors = forward.anchors;
    reverse.codes = forward.codes;
    reverse.scales = forward.scales;
    reverse.signs = forward.signs;
    reverse.cotangent = make(state, s.stream);
    reverse.grad_x = random.chance(4) ? Memory{} : make(state, s.stream);
    if (random.chance(2)) {
      reverse.nonfinite = make(1, DType::float32);
      *pointer<int32_t>(reverse.nonfinite) = -1;
    }
  }

  void give_bits() {
    s.bits = bits.data();
    s.bits_count = int64_t(bits.size());
  }

  void spoil_number(int64_t& number) {
    number = random.any<int64_t>({-1, 0, 1, 2, 3, 7, 41, number + 1, number - 1, 2 * number,
                                  int64_t{1} << 24, int64_t{1} << 31, int64_t{1} << 40,
                                  std::numeric_limits<int64_t>::max(),
                                  std::numeric_limits<int64_t>::min()});
  }
  void spoil(Memory& memory) {
    switch (random.from(0, 3)) {
      case 0:
        memory.bytes -= memory.bytes > 0;
        break;
      case 1:
        memory.bytes = memory.bytes / 2;
        break;
      case 2:
        memory = {memory.at ? memory.at + 1 : 0, memory.bytes - (memory.bytes > 0)};
        break;
      default:
        memory = {};
    }
  }
  void spoil() {
    valid = false;
    std::vector<int64_t*> numbers = {&s.steps,  &s.rows,  &s.dim,         &s.hidden,
                                     &s.height, &s.width, &s.anchor_every};
    for (Convolution& c : s.convolutions) numbers.insert(numbers.end(), {&c.in, &c.out, &c.size});
    std::vector<Memory*> memories = {
        &forward.x,     &forward.y,      &forward.anchors,    &forward.codes,  &forward.scales,
        &forward.signs, &reverse.signs,  &forward.statistics, &reverse.start,  &reverse.anchors,
        &reverse.codes, &reverse.scales, &reverse.cotangent,  &reverse.grad_x, &reverse.nonfinite};
    for (Memory& memory : parameters) memories.push_back(&memory);
    for (Memory& memory : reverse.gradients) memories.push_back(&memory);
    switch (random.from(0, 10)) {
      case 0:
        s.block = Block(random.from(0, 2));
        break;
      case 1:
        s.activation = Activation::identity;
        s.scheme = Scheme(random.from(0, 1));
        s.tied = !s.tied;
        break;
      case 2:
        s.stream = DType(random.from(0, 1));
        s.storage = DType(random.from(0, 3));
        break;
      case 3:
        s.layers = int(random.from(0, kMaxLayers));
        break;
      case 4:
        s.threads = int(random.any<int64_t>({-1, 0, 2, 1 << 30}));
        break;
      case 5:
        reverse.order = int(random.any<int64_t>({-1, 0, 4, 7}));
        break;
      case 6:
        reverse.reverse_rule = ReverseRule(random.from(0, 4));
        break;
      case 7:
        spoil_number(*numbers[random.from(0, int64_t(numbers.size()) - 1)]);
        break;
      case 8:
        random.chance(2) ? parameters.pop_back() : parameters.push_back(forward.x);
        break;
      case 9:
        spoil_bits();
        break;
      default:
        spoil(*memories[random.from(0, int64_t(memories.size()) - 1)]);
    }
  }

  int strange_bits() { return int(random.any<int64_t>({-8, -1, 1, 7, 9, 17, 1 << 20})); }
  void spoil_bits() {
    if (bits.empty() || random.chance(3))
      bits.push_back(any_bits());
    else if (random.chance(2))
      bits.pop_back();
    else
      bits[size_t(random.from(0, int64_t(bits.size()) - 1))] = strange_bits();
    give_bits();
  }

  [[noreturn]] void fail(const char* why) const {
    std::printf("failed: %s (block %d, scheme %d, storage %d, σ %d, rows %" PRId64 ", dim %" PRId64
                ", hidden %" PRId64 ", steps %" PRId64 ")\n",
                why, int(s.block), int(s.scheme), int(s.storage), int(s.activation), s.rows, s.dim,
                s.hidden, s.steps);
    say_seed();
    std::exit(1);
  }

  template <class F>
  void in_workspace(F run) {
    const size_t bytes = run(nullptr, Stop{});
    if (bytes > size_t{64} << 20) return;  // a valid problem, but not one to run here
    const size_t whole = (bytes + 63) / 64 * 64;
    const Buffer workspace(static_cast<char*>(std::aligned_alloc(64, whole)), &std::free);
    std::memset(workspace.get(), 0xff, whole);  // NaN
    // Changed to 2^24 steps, a tied stage may still be a valid problem, which would run for
    // minutes.
    int64_t left = random.chance(8) || s.steps > 1000 ? random.from(0, 3) : -1;
    const auto asked = [](void* steps) { return --*static_cast<int64_t*>(steps) < 0; };
    const bool stopped = left >= 0;
    run(checked_workspace({reinterpret_cast<uintptr_t>(workspace.get()), bytes}, bytes, 64),
        Stop{stopped ? +asked : nullptr, &left, 0});
    if (stopped) valid = false;  // what was written is of no use
    if (valid) check_results();
  }

  void check_results() {
    std::vector<Memory> results = {forward.y, reverse.grad_x};
    results.insert(results.end(), reverse.gradients.begin(), reverse.gradients.end());
    for (size_t i = 0; i < results.size(); ++i)
      check_finite("result " + std::to_string(i), results[i], i < 2 ? s.stream : s.storage);
  }
  void check_finite(const std::string& name, Memory result, DType type) const {
    for (size_t at = 0; at + bytes_of(type) <= result.bytes; at += bytes_of(type))
      if (!finite(pointer<char>(result) + at, type)) fail((name + " is not finite").c_str());
  }
  static bool finite(const char* at, DType type) {
    double d;
    float f;
    uint16_t h;
    if (type == DType::float64) return std::memcpy(&d, at, 8), std::isfinite(d);
    if (type == DType::float32) return std::memcpy(&f, at, 4), std::isfinite(f);
    std::memcpy(&h, at, 2);
    const uint16_t exponent = type == DType::float16 ? 0x7c00 : 0x7f80;
    return (h & exponent) != exponent;
  }

  // An increment by itself: recorded, then undone from the memory that this has written.
  void run_increment(const Kernels& kernels) {
    IncrementMemory io{};
    io.stream = random.any({DType::float32, DType::float64});
    io.rows = random.from(1, 40);
    io.row = random.from(1, 130);
    io.bits = any_bits();
    io.threads = random.chance(8) ? int(random.from(2, 3)) : 1;
    const int64_t state = io.rows * io.row;
    io.x = make(state, io.stream);
    io.estimate = make(state, io.stream);
    io.moved = random.chance(2) ? io.estimate : make(state, io.stream);
    io.codes = make_bytes(io.rows * ((io.row + 7) / 8) * io.bits);
    io.scales = make(io.rows * ((io.row + 31) / 32), DType::bfloat16);
    if (random.chance(2)) spoil(io);
    for (const Memory x : {io.x, Memory{}}) {
      io.x = x;
      kernels.increment(checked(io));
      if (valid) check_finite("moved", io.moved, io.stream);
      io.estimate = io.moved;
    }
  }
  void spoil(IncrementMemory& io) {
    valid = false;
    Memory* const memories[] = {&io.x, &io.estimate, &io.moved, &io.codes, &io.scales};
    switch (random.from(0, 4)) {
      case 0:
        spoil_number(random.chance(2) ? io.rows : io.row);
        break;
      case 1:
        io.bits = random.chance(2) ? any_bits() : random.any({0, strange_bits()});
        break;
      case 2:
        io.threads = int(random.any<int64_t>({-1, 0, 2, 1 << 30}));
        break;
      case 3:
        io.stream = DType(random.from(0, 1));
        break;
      default:
        spoil(*memories[random.from(0, 4)]);
    }
  }

  // Returns whether it was run.
  bool run(const Kernels& kernels) {
    try {
      if (random.chance(5)) {
        run_increment(kernels);
        return true;
      }
      describe();
      allocate();
      if (random.chance(2)) spoil();
      std::vector<void*> table = complete(s, parameters), gradients;
      const Forward f = checked(s, forward);
      const Reverse r = checked(s, reverse, gradients);
      in_workspace([&](void* w, Stop stop) { return kernels.forward(s, f, w, stop); });
      in_workspace([&](void* w, Stop stop) { return kernels.reverse(s, r, w, stop); });
      return true;
    } catch (const std::invalid_argument& refused) {
      if (valid) fail(refused.what());
      return false;
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  const uint64_t calls = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const uint64_t first =
      argc > 2 ? std::strtoull(argv[2], nullptr, 10) : uint64_t{std::random_device{}()} << 20;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  __sanitizer_set_death_callback(say_seed);
  std::printf("fuzz: %" PRIu64 " calls from seed %" PRIu64 "\n", calls, first);
  std::vector<const Kernels*> usable;
  for (const Build& build : builds())
    if (build.supported) usable.push_back(build.kernels);
  uint64_t run = 0;
  for (uint64_t seed = first; seed < first + calls; ++seed) {
    current = seed;
    Call call(seed);
    run += call.run(*usable[seed % usable.size()]);
    const uint64_t done = seed - first + 1;
    if (done % 10000 == 0)
      std::printf("fuzz: %" PRIu64 " calls so far, %" PRIu64 " of them run\n", done, run);
  }
  std::printf("fuzz: %" PRIu64 " calls were run, %" PRIu64 " refused\n", run, calls - run);
}
