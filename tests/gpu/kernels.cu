// A forward that saves nothing, and one that saves with its backward, without XLA: a digest of the bits that each
// leaves, and its time as a CUDA graph; or only its kernels, once, for a profiler.
//   nvcc -O3 -std=c++17 -arch=sm_90 -I. tests/gpu/kernels.cu cuda/*.cu cuda/*.cc -o build/kernels
//   build/kernels P T S D W C BRANCHES    (flagship: 2 32768 65536 1024 64 64 4; a bfloat16 bank, S a power of two)
//   ncu --cache-control none --replay-mode application build/kernels P T S D W C BRANCHES plain
#include <cstring>

#include "cuda/geometry.h"
#include "cuda/launch.h"
#include "tests/gpu/arrays.cuh"

namespace {

using namespace sdm;
using bare::allocate;
using bare::check;

constexpr int kBranches = 4;

struct Streams {
  int most;
  cudaStream_t streams[kBranches];
  cudaEvent_t events[kBranches + 1];

  explicit Streams(int branches) : most(std::min(branches, kBranches)) {
    for (cudaStream_t& s : streams) check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (cudaEvent_t& e : events) check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  }
  gpu::Branches branches(int count) const { return {std::min(count, most), streams, events}; }
};

Chunks chunks(const Shape& s) {
  const int64_t n = s.streams * s.stored_chunks, tokens = s.streams * s.stored_tokens;
  Chunks c;
  c.a = allocate<float>(n * s.chunk * s.chunk);
  c.qk = allocate<float>(n * s.chunk * s.chunk);
  c.k_eff = allocate<float>(tokens * s.writes);
  c.k_carry = allocate<float>(tokens * s.writes);
  c.q_eff = allocate<float>(tokens * s.reads);
  c.slots = allocate<int32_t>(n * s.write_slots);
  c.starts = allocate<int32_t>(n * (s.write_slots + 1));
  c.order = allocate<int32_t>(n * s.chunk * s.writes);
  c.decay = allocate<float>(n * s.write_slots);
  c.read_slots = allocate<int32_t>(n * s.read_slots);
  c.read_starts = allocate<int32_t>(n * (s.read_slots + 1));
  c.read_order = allocate<int32_t>(n * s.chunk * s.reads);
  c.writes = allocate<int32_t>(tokens);
  return c;
}

template <class Run>
void measure(const Streams& side, const char* name, bool plain, Run run) {
  const cudaStream_t stream = side.streams[0];
  if (plain) {
    run();
    check(cudaStreamSynchronize(stream));
    return;
  }
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&exec, graph, 0));
  const bare::Times times = bare::time(stream, 10, [&] { check(cudaGraphLaunch(exec, stream)); });
  std::printf("%s %.3f ms (best %.3f)  ", name, times.median, times.best);
  check(cudaGraphExecDestroy(exec));
  check(cudaGraphDestroy(graph));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) {
    std::printf("P T S D W C BRANCHES [plain]\n");
    return 2;
  }
  Shape s;
  s.streams = std::atoll(argv[1]);
  s.tokens = s.stored_tokens = std::atoll(argv[2]);
  s.slots = std::atoll(argv[3]);
  s.width = std::atoll(argv[4]);
  s.writes = s.reads = std::atoll(argv[5]);
  s.chunk = std::atoll(argv[6]);
  const Streams side(std::atoi(argv[7]));
  const bool plain = argc > 8 && std::strcmp(argv[8], "plain") == 0;
  s.gates = 1;
  s.write_slots = s.read_slots = std::min(s.slots, s.chunk * s.writes);
  s.stored_chunks = s.chunks();
  const int64_t tokens = s.streams * s.tokens, bank_size = s.streams * s.slots * s.width;
  const int64_t squares = s.streams * s.chunks() * s.chunk * s.chunk, one_chunk = s.streams * s.chunk * s.width;
  const int64_t records = s.streams * s.chunks() * 4 * s.chunk * s.writes;

  Forward f;
  f.shape = s;
  f.dtype = DType::bf16;
  f.in.k_idx = bare::ids(tokens, s.writes, s.slots, 5);
  f.in.q_idx = bare::ids(tokens, s.reads, s.slots, 6);
  f.in.k_val = bare::numbers(tokens * s.writes, 2);
  f.in.q_val = bare::numbers(tokens * s.reads, 3);
  f.in.v = bare::numbers(tokens * s.width, 4);
  f.in.beta = bare::constant(tokens, 0.5f);
  f.in.g = bare::constant(tokens, -0.1f);
  f.bank = bare::numbers(bank_size, 1);
  f.chunks = chunks(s);
  f.x = allocate<float>(squares);
  f.qx = allocate<float>(squares);
  f.u = allocate<float>(one_chunk);
  f.inter = allocate<float>(one_chunk);
  f.error = allocate<float>(tokens * s.width);
  f.delta = allocate<float>(tokens * s.width);
  f.y = allocate<uint16_t>(tokens * s.width);
  f.snapshot = allocate<uint16_t>(s.streams * s.chunks() * s.write_slots * s.width);
  f.records = allocate<int32_t>(records);

  // As many chunks at a time as sdm_jax/_cuda_calls.py has.
  Forward bare_forward = f;
  bare_forward.one_chunk_rows = true;
  bare_forward.error = bare_forward.snapshot = nullptr;
  Shape& slab = bare_forward.shape;
  slab.stored_chunks = std::min(s.chunks(), std::max<int64_t>(1, 1024 / s.streams));
  slab.stored_tokens = std::min(s.tokens, slab.stored_chunks * s.chunk);

  Backward b;
  b.shape = s;
  b.dtype = b.grad_dtype = DType::bf16;
  b.in = f.in;
  b.chunks = f.chunks;
  b.bank = f.bank;
  b.d_bank = bare::numbers(bank_size, 7);
  b.x = f.x;
  b.error = f.error;
  b.delta = f.delta;
  b.snapshot = f.snapshot;
  b.dy = bare::numbers(tokens * s.width, 8);
  b.carried = allocate<float>(one_chunk);
  b.dv = allocate<float>(tokens * s.width);
  b.qx = allocate<float>(squares);
  b.write_records = allocate<int32_t>(records);
  b.read_records = allocate<int32_t>(records);
  b.parts = gpu::column_slices(s);
  b.da = allocate<float>(squares);
  b.dqk = allocate<float>(squares);
  b.dk_eff = allocate<float>(b.parts * tokens * s.writes);
  b.dk_carry = allocate<float>(b.parts * tokens * s.writes);
  b.dq_eff = allocate<float>(b.parts * tokens * s.reads);
  b.ddecay = allocate<float>(b.parts * s.streams * s.chunks() * s.write_slots);
  b.dbeta = allocate<float>(tokens);
  b.dk_val = allocate<float>(tokens * s.writes);
  b.dg = allocate<float>(tokens);
  b.dq_val = allocate<float>(tokens * s.reads);
  b.dx = b.dk_carry;
  check(cudaDeviceSynchronize());

  const cudaStream_t stream = side.streams[0];
  const auto bits = [&](const char* name, const void* x, int64_t bytes) {
    std::printf("%s %016llx  ", name, bare::digest(x, bytes, stream));
  };
  const int64_t y_bytes = 2 * tokens * s.width, bank_bytes = 2 * bank_size;
  const int all = gpu::kPrepare | gpu::kBackwardSteps | gpu::kSquares | gpu::kAddParts | gpu::kPhase1Backward;
  const auto forward = [&] {
    check(
        gpu::forward(bare_forward, gpu::kAllStages, 0, s.chunks(), side.branches(gpu::forward_branches(bare_forward))));
  };
  const auto saving_forward = [&] {
    check(gpu::forward(f, gpu::kAllStages, 0, s.chunks(), side.branches(gpu::forward_branches(f))));
  };
  const auto backward = [&] { check(gpu::backward(b, all, 0, s.chunks(), side.branches(gpu::backward_branches(b)))); };
  if (!plain) {
    const unsigned long long before = bare::digest(f.bank, bank_bytes, stream);
    forward();
    bits("y", f.y, y_bytes);
    bits("bank", f.bank, bank_bytes);
    bare::numbers(bank_size, 1, stream, static_cast<uint16_t*>(f.bank));
    saving_forward();
    bits("saving: y", f.y, y_bytes);
    bits("bank", f.bank, bank_bytes);
    backward();
    bits("backward: d_bank", b.d_bank, bank_bytes);
    bits("dv", b.dv, 2 * y_bytes);
    bits("dk_val", b.dk_val, 4 * tokens * s.writes);
    const bool same = bare::digest(f.bank, bank_bytes, stream) == before;
    std::printf("bank %s\n", same ? "restored" : "NOT RESTORED");
    if (!same) return 1;
  }
  measure(side, "forward", plain, forward);
  measure(side, "saving forward", plain, saving_forward);
  measure(side, "backward", plain, backward);
  std::printf("\n");
  return 0;
}
