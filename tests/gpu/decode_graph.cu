// Decode alone: microseconds a step of a CUDA graph of 64 steps, each with ids of its own.
//   nvcc -O3 -std=c++17 -arch=sm_90 -I. tests/gpu/decode_graph.cu cuda/decode.cu -o build/decode_graph
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/launch.h"

#ifdef STAMPS
namespace sdm::gpu {
void print_stamps(int blocks);
}
#endif
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
__global__ void make_ids(int32_t* ids, int64_t tokens, uint32_t seed, uint32_t shrink) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= tokens * kEntries) return;
  uint32_t h = static_cast<uint32_t>(i / kEntries) * 747796405u + seed;
  h ^= h >> 16;
  h *= 2246822519u;
  h ^= h >> 13;
  ids[i] = static_cast<int32_t>((h + static_cast<uint32_t>(i % kEntries) * (2 * (h >> 5) + 1)) % (static_cast<uint32_t>(kSlots) / shrink));
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

void measure(int64_t streams, const std::vector<const char*>& configs) {
  const int64_t bank_size = streams * kSlots * kWidth, entries = kSteps * streams * kEntries;
  const int64_t rows = kSteps * streams * kWidth;
  const uint32_t shrink = std::getenv("SHRINK") ? std::atoi(std::getenv("SHRINK")) : 1;
  auto* bank = allocate<uint16_t>(bank_size);
  auto *k_idx = allocate<int32_t>(entries), *q_idx = allocate<int32_t>(entries);
  auto *k_val = allocate<uint16_t>(entries), *q_val = allocate<uint16_t>(entries);
  auto *v = allocate<uint16_t>(rows), *y = allocate<uint16_t>(rows);
  auto *beta = allocate<float>(kSteps * streams), *g = allocate<float>(kSteps * streams);
  fill<<<1024, 256>>>(bank, bank_size, 1);
  fill<<<1024, 256>>>(k_val, entries, 2);
  fill<<<1024, 256>>>(q_val, entries, 3);
  fill<<<1024, 256>>>(v, rows, 4);
  make_ids<<<(entries + 255) / 256, 256>>>(k_idx, kSteps * streams, 5, shrink);
  make_ids<<<(entries + 255) / 256, 256>>>(q_idx, kSteps * streams, 6, shrink);
  std::vector<float> half(kSteps * streams, 0.5f), gate(kSteps * streams, -0.1f);
  check(cudaMemcpy(beta, half.data(), half.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemcpy(g, gate.data(), gate.size() * 4, cudaMemcpyHostToDevice));

  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  for (const char* config : configs) {
    {  // "NAME=VALUE,NAME=VALUE"
      std::stringstream in(config);
      std::string part;
      for (const char* n : {"ORDER", "AHEAD", "STREAMING", "LANES", "CLUSTER", "ROWS"}) unsetenv(n);
      while (std::getline(in, part, ',')) {
        const size_t at = part.find('=');
        if (at != std::string::npos) setenv(part.substr(0, at).c_str(), part.substr(at + 1).c_str(), 1);
      }
    }
    std::printf("%3d %-24s", static_cast<int>(streams), config);
    for (const int mode : {0, 1, 2}) {
      const bool overlap = mode == 1;
      cudaGraph_t graph;
      if (mode == 2) check(cudaGraphCreate(&graph, 0));
      cudaGraphNode_t last;
      if (mode != 2) check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int64_t t = 0; t < kSteps; ++t) {
        if (mode == 2) check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
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
        if (mode == 2) {
          cudaGraph_t one;
          check(cudaStreamEndCapture(stream, &one));
          cudaGraphNode_t node;
          check(cudaGraphAddChildGraphNode(&node, graph, t > 0 ? &last : nullptr, t > 0 ? 1 : 0, one));
          last = node;
        }
      }
      if (mode != 2) check(cudaStreamEndCapture(stream, &graph));
      cudaGraphExec_t exec;
      check(cudaGraphInstantiate(&exec, graph, 0));
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
      std::printf("  %s %6.2f (%5.2f)", mode == 2 ? "child" : overlap ? "overlap" : "serial", total / 20 / kSteps * 1e3,
                  best / kSteps * 1e3);
#ifdef STAMPS
      std::printf("\n");
      sdm::gpu::print_stamps(std::getenv("ROWS") ? streams * std::atoi(std::getenv("ROWS")) : streams * 8);
#endif
    }
    std::printf("\n");
  }
  for (void* p : {static_cast<void*>(bank), static_cast<void*>(k_idx), static_cast<void*>(q_idx),
                  static_cast<void*>(k_val), static_cast<void*>(q_val), static_cast<void*>(v), static_cast<void*>(y),
                  static_cast<void*>(beta), static_cast<void*>(g)}) {
    check(cudaFree(p));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const int64_t streams : {8, 64}) {
    std::vector<const char*> configs;
    for (int i = 1; i < argc; ++i) {
      const bool many = argv[i][0] == '+', few = argv[i][0] == '-';
      if ((many && streams == 8) || (few && streams == 64)) continue;
      configs.push_back(many || few ? argv[i] + 1 : argv[i]);
    }
    if (configs.empty()) configs.push_back("");
    measure(streams, configs);
  }
  return 0;
}
