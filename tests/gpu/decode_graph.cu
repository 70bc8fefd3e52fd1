// Decode alone: microseconds a step of a CUDA graph of 64 steps, each with ids of its own. Steps follow one another, or
// overlap, or are graphs of their own within the graph, one after another, as XLA makes them of its calls. Fails unless
// all ways leave the same bits.
//   nvcc -O3 -std=c++17 -arch=sm_90 -I. tests/gpu/decode_graph.cu cuda/decode.cu -o build/decode_graph
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/launch.h"

namespace {

constexpr int kSteps = 64;
constexpr int64_t kSlots = 65536, kWidth = 1024, kEntries = 64;

__global__ void fill(uint16_t* x, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    x[i] = static_cast<uint16_t>(0x3c00 + (h & 0x81ff));  // bfloat16 of magnitude 2^-7 to 2^-3
  }
}

// Distinct ids within a token: a random start, then odd steps through the power of two of slots.
__global__ void make_ids(int32_t* ids, int64_t tokens, uint32_t seed) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= tokens * kEntries) return;
  uint32_t h = static_cast<uint32_t>(i / kEntries) * 747796405u + seed;
  h ^= h >> 16;
  h *= 2246822519u;
  h ^= h >> 13;
  ids[i] = static_cast<int32_t>((h + static_cast<uint32_t>(i % kEntries) * (2 * (h >> 5) + 1)) % kSlots);
}

// Adds up a hash of every number and its place.
__global__ void digest(const uint16_t* x, int64_t n, unsigned long long* sum) {
  unsigned long long part = 0;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    const uint64_t h = (static_cast<uint64_t>(i) * 65536 + x[i] + 1) * 0x9e3779b97f4a7c15u;
    part += (h ^ h >> 31) * 0xbf58476d1ce4e5b9u;
  }
  atomicAdd(sum, part);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

template <class T>
T* allocate(int64_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, n * sizeof(T)));
  check(cudaMemset(p, 0, n * sizeof(T)));
  return static_cast<T*>(p);
}

void measure(int64_t streams) {
  const int64_t bank_size = streams * kSlots * kWidth, entries = kSteps * streams * kEntries;
  const int64_t rows = kSteps * streams * kWidth;
  auto* bank = allocate<uint16_t>(bank_size);
  auto *k_idx = allocate<int32_t>(entries), *q_idx = allocate<int32_t>(entries);
  auto *k_val = allocate<uint16_t>(entries), *q_val = allocate<uint16_t>(entries);
  auto *v = allocate<uint16_t>(rows), *y = allocate<uint16_t>(rows);
  auto *beta = allocate<float>(kSteps * streams), *g = allocate<float>(kSteps * streams);
  auto* sum = allocate<unsigned long long>(1);
  fill<<<1024, 256>>>(k_val, entries, 2);
  fill<<<1024, 256>>>(q_val, entries, 3);
  fill<<<1024, 256>>>(v, rows, 4);
  make_ids<<<(entries + 255) / 256, 256>>>(k_idx, kSteps * streams, 5);
  make_ids<<<(entries + 255) / 256, 256>>>(q_idx, kSteps * streams, 6);
  std::vector<float> half(kSteps * streams, 0.5f), gate(kSteps * streams, -0.1f);
  check(cudaMemcpy(beta, half.data(), half.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemcpy(g, gate.data(), gate.size() * 4, cudaMemcpyHostToDevice));

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const auto capture = [&](int64_t t, bool overlap) {
    sdm::Decode d;
    d.shape.streams = streams;
    d.shape.tokens = d.shape.chunk = d.shape.gates = 1;
    d.shape.slots = kSlots;
    d.shape.width = kWidth;
    d.shape.writes = d.shape.reads = kEntries;
    d.dtype = sdm::DType::bf16;
    const int64_t e = t * streams * kEntries, r = t * streams * kWidth;
    d.in = {k_idx + e, k_val + e, v + r, beta + t * streams, g + t * streams, q_idx + e, q_val + e};
    d.bank = bank;
    d.y = y + r;
    check(sdm::gpu::decode(d, {stream, overlap && t > 0}));
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
    fill<<<1024, 256, 0, stream>>>(bank, bank_size, 1);
    check(cudaMemsetAsync(y, 0, rows * sizeof(uint16_t), stream));
    check(cudaMemsetAsync(sum, 0, sizeof(*sum), stream));
    check(cudaGraphLaunch(exec, stream));
    digest<<<1024, 256, 0, stream>>>(bank, bank_size, sum);
    digest<<<1024, 256, 0, stream>>>(y, rows, sum);
    unsigned long long found;
    check(cudaMemcpyAsync(&found, sum, sizeof(found), cudaMemcpyDeviceToHost, stream));
    check(cudaStreamSynchronize(stream));
    if (way == one_by_one) bits = found;
    if (found != bits) {
      std::printf("decode, %3lld streams, %s: other bits than one by one\n", static_cast<long long>(streams),
                  names[way]);
      std::exit(1);
    }
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    float best = 1e9f, total = 0;
    for (int i = 0; i < 25; ++i) {
      check(cudaEventRecord(begin, stream));
      check(cudaGraphLaunch(exec, stream));
      check(cudaEventRecord(end, stream));
      check(cudaEventSynchronize(end));
      float ms;
      check(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 5) total += ms;
      best = ms < best ? ms : best;
    }
    std::printf("decode, %3lld streams, %-12s: %6.2f us a step (best %.2f)\n", static_cast<long long>(streams),
                names[way], total / 20 / kSteps * 1e3, best / kSteps * 1e3);
  }
  for (void* p : {static_cast<void*>(bank), static_cast<void*>(k_idx), static_cast<void*>(q_idx),
                  static_cast<void*>(k_val), static_cast<void*>(q_val), static_cast<void*>(v), static_cast<void*>(y),
                  static_cast<void*>(beta), static_cast<void*>(g), static_cast<void*>(sum)}) {
    check(cudaFree(p));
  }
}

}  // namespace

int main() {
  for (const int64_t streams : {1, 8, 64}) measure(streams);
  return 0;
}
