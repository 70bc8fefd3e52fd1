// The distinct slots of a chunk and their entries, as Phase 1 lists them.
#pragma once

#include <cstdint>

namespace sdm::gpu {

// The lists of one chunk. They may come from a caller, so every position is checked before use.
struct SlotLists {
  const int32_t* slots;   // [most] ascending, then -1
  const int32_t* starts;  // [most + 1]
  const int32_t* order;   // [entries]
  int most;
  int entries;  // of the chunk, valid or not
  int num_slots;

  __device__ int slot(int i) const {
    const int s = i < most ? slots[i] : -1;
    return s < num_slots ? s : -1;
  }
  __device__ int begin(int i) const { return bounded(starts[i]); }
  __device__ int end(int i) const { return bounded(starts[i + 1]); }
  // A position, or -1.
  __device__ int position(int e) const {
    const int p = order[e];
    return static_cast<unsigned>(p) < static_cast<unsigned>(entries) ? p : -1;
  }
  // The index of a slot, or -1 (-1, the padding, compares as the largest).
  __device__ int find(int slot) const {
    int low = 0, high = most;
    while (low < high) {
      const int mid = (low + high) >> 1;
      if (static_cast<unsigned>(slots[mid]) < static_cast<unsigned>(slot)) low = mid + 1;
      else high = mid;
    }
    return low < most && slots[low] == slot ? low : -1;
  }

 private:
  __device__ int bounded(int start) const { return min(max(start, 0), entries); }
};

__device__ inline double warp_sum(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
// Inclusive sum over the lanes up to this one.
__device__ inline double warp_prefix(double x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double y = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += y;
  }
  return x;
}

}  // namespace sdm::gpu
