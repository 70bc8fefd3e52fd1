// Decode alone: microseconds a step of a CUDA graph of 64 steps, each with ids of its own. Steps follow one another, or
// overlap, or are graphs of their own within the graph, one after another, as XLA makes them of its calls. Fails unless
// all ways leave the same bits.
//   nvcc -O3 -std=c++17 -arch=sm_90 -I. tests/gpu/decode_graph.cu cuda/decode.cu -o build/decode_graph
#include "cuda/launch.h"
#include "tests/gpu/arrays.cuh"

namespace {

using namespace sdm;
using bare::allocate;
using bare::check;

constexpr int kSteps = 64;
constexpr int64_t kSlots = 65536, kWidth = 1024, kEntries = 64;

void measure(int64_t streams) {
  const int64_t bank_size = streams * kSlots * kWidth, entries = kSteps * streams * kEntries;
  const int64_t rows = kSteps * streams * kWidth;
  uint16_t* bank = bare::numbers(bank_size, 1);
  int32_t *k_idx = bare::ids(kSteps * streams, kEntries, kSlots, 5),
          *q_idx = bare::ids(kSteps * streams, kEntries, kSlots, 6);
  uint16_t *k_val = bare::numbers(entries, 2), *q_val = bare::numbers(entries, 3), *v = bare::numbers(rows, 4);
  auto* y = allocate<uint16_t>(rows);
  float *beta = bare::constant(kSteps * streams, 0.5f), *g = bare::constant(kSteps * streams, -0.1f);
  check(cudaDeviceSynchronize());

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const auto capture = [&](int64_t t, bool overlap) {
    Decode d;
    d.shape.streams = streams;
    d.shape.tokens = d.shape.chunk = d.shape.gates = 1;
    d.shape.slots = kSlots;
    d.shape.width = kWidth;
    d.shape.writes = d.shape.reads = kEntries;
    d.dtype = DType::bf16;
    const int64_t e = t * streams * kEntries, r = t * streams * kWidth;
    d.in = {k_idx + e, k_val + e, v + r, beta + t * streams, g + t * streams, q_idx + e, q_val + e};
    d.bank = bank;
    d.y = y + r;
    check(gpu::decode(d, {stream, overlap && t > 0}));
  };
  enum Way { one_by_one, overlapping, graph_each };
  unsigned long long bits = 0;
  const char* names[] = {"one by one", "overlapping", "a graph each"};
  for (const Way way : {one_by_one, overlapping, graph_each}) {
    cudaGraph_t graph;
    if (way == graph_each) {
      check(cudaGraphCreate(&graph, 0));
      cudaGraphNode_t last = nullptr;
      for (int64_t t = 0; t < kSteps; ++t) {
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        capture(t, false);
        cudaGraph_t step;
        check(cudaStreamEndCapture(stream, &step));
        cudaGraphNode_t node;
        check(cudaGraphAddChildGraphNode(&node, graph, &last, t > 0, step));
        check(cudaGraphDestroy(step));  // the node has a copy
        last = node;
      }
    } else {
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int64_t t = 0; t < kSteps; ++t) capture(t, way == overlapping);
      check(cudaStreamEndCapture(stream, &graph));
    }
    cudaGraphExec_t exec;
    check(cudaGraphInstantiate(&exec, graph, 0));
    bare::numbers(bank_size, 1, stream, bank);
    check(cudaMemsetAsync(y, 0, rows * sizeof(uint16_t), stream));
    check(cudaGraphLaunch(exec, stream));
    const unsigned long long found = bare::digest(bank, 2 * bank_size, stream) + 3 * bare::digest(y, 2 * rows, stream);
    if (way == one_by_one) bits = found;
    if (found != bits) {
      std::printf("decode, %3lld streams, %s: other bits than one by one\n", static_cast<long long>(streams),
                  names[way]);
      std::exit(1);
    }
    const bare::Times times = bare::time(stream, 20, [&] { check(cudaGraphLaunch(exec, stream)); });
    std::printf("decode, %3lld streams, %-12s: %6.2f us a step (best %.2f)\n", static_cast<long long>(streams),
                names[way], times.median / kSteps * 1e3, times.best / kSteps * 1e3);
  }
  for (void* p : {static_cast<void*>(bank), static_cast<void*>(k_idx), static_cast<void*>(q_idx),
                  static_cast<void*>(k_val), static_cast<void*>(q_val), static_cast<void*>(v), static_cast<void*>(y),
                  static_cast<void*>(beta), static_cast<void*>(g)}) {
    check(cudaFree(p));
  }
}

}  // namespace

int main() {
  for (const int64_t streams : {1, 8, 64}) measure(streams);
  return 0;
}
