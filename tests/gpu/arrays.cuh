// What the programs of this folder that run kernels without XLA share: arrays of made-up numbers and ids, errors,
// times.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace sdm::bare {

inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Zeros.
template <class T>
T* allocate(int64_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<int64_t>(1, n) * sizeof(T)));
  check(cudaMemset(p, 0, std::max<int64_t>(1, n) * sizeof(T)));
  return static_cast<T*>(p);
}

// bfloat16 of magnitude 2^-7 to 2^-3.
static __global__ void fill(uint16_t* x, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u + seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    x[i] = static_cast<uint16_t>(0x3c00 + (h & 0x81ff));
  }
}

inline uint16_t* numbers(int64_t n, uint32_t seed, cudaStream_t stream = nullptr, uint16_t* into = nullptr) {
  uint16_t* x = into != nullptr ? into : allocate<uint16_t>(n);
  fill<<<1024, 256, 0, stream>>>(x, n, seed);
  return x;
}

inline float* constant(int64_t n, float value) {
  float* x = allocate<float>(n);
  const std::vector<float> host(n, value);
  check(cudaMemcpy(x, host.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  return x;
}

// Distinct ids within a token: a random start, then odd steps through `slots`, a power of two.
static __global__ void make_ids(int32_t* ids, int64_t count, int64_t per_token, int64_t slots, uint32_t seed) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i >= count) return;
  uint32_t h = static_cast<uint32_t>(i / per_token) * 747796405u + seed;
  h ^= h >> 16;
  h *= 2246822519u;
  h ^= h >> 13;
  ids[i] = static_cast<int32_t>((h + static_cast<uint32_t>(i % per_token) * (2 * (h >> 5) + 1)) % slots);
}

inline int32_t* ids(int64_t tokens, int64_t per_token, int64_t slots, uint32_t seed) {
  int32_t* x = allocate<int32_t>(tokens * per_token);
  make_ids<<<(tokens * per_token + 255) / 256, 256>>>(x, tokens * per_token, per_token, slots, seed);
  return x;
}

// Adds up a hash of every number and its place.
static __global__ void add_digest(const uint16_t* x, int64_t n, unsigned long long* sum) {
  unsigned long long part = 0;
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    const uint64_t h = (static_cast<uint64_t>(i) * 65536 + x[i] + 1) * 0x9e3779b97f4a7c15u;
    part += (h ^ h >> 31) * 0xbf58476d1ce4e5b9u;
  }
  atomicAdd(sum, part);
}

// Of all bits of an array, once what is on the stream is done.
inline unsigned long long digest(const void* x, int64_t bytes, cudaStream_t stream) {
  static unsigned long long* sum = allocate<unsigned long long>(1);
  check(cudaDeviceSynchronize());
  unsigned long long found = 0;
  check(cudaMemsetAsync(sum, 0, sizeof(found), stream));
  add_digest<<<1024, 256, 0, stream>>>(static_cast<const uint16_t*>(x), bytes / 2, sum);
  check(cudaGetLastError());
  check(cudaMemcpyAsync(&found, sum, sizeof(found), cudaMemcpyDeviceToHost, stream));
  check(cudaStreamSynchronize(stream));
  return found;
}

struct Times {
  float median, best;  // milliseconds
};

// Of `repeats` runs on the stream, after two.
template <class Run>
Times time(cudaStream_t stream, int repeats, Run&& run) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = -2; i < repeats; ++i) {
    check(cudaEventRecord(begin, stream));
    run();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(ms);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times.front()};
}

}  // namespace sdm::bare
