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
      if (static_cast<unsigned>(slots[mid]) < static_cast<unsigned>(slot))
        low = mid + 1;
      else
        high = mid;
    }
    return low < most && slots[low] == slot ? low : -1;
  }

 private:
  __device__ int bounded(int start) const { return min(max(start, 0), entries); }
};

// What a mover needs to know of a slot, in one 16-byte load: the slot (-1: none), its first entry, its
// decay over the chunk, and the first entry's weight.
struct SlotRecord {
  static constexpr int kSingle = 1 << 16;  // no other entry; else the lists say which
  static constexpr int kLinked = 1 << 17;  // the slot is in the other list too

  int4 bits;

  __device__ static int4 make(int slot, int position, bool single, bool linked, float decay, float weight) {
    return make_int4(slot, position | (single ? kSingle : 0) | (linked ? kLinked : 0), __float_as_int(decay),
                     __float_as_int(weight));
  }
  __device__ int slot() const { return bits.x; }
  __device__ int position() const { return bits.y & 0xffff; }
  __device__ bool single() const { return bits.y & kSingle; }
  __device__ bool linked() const { return bits.y & kLinked; }
  __device__ float decay() const { return __int_as_float(bits.z); }
  __device__ float weight() const { return __int_as_float(bits.w); }
};

// The record of slot `i` of the lists.
__device__ inline int4 make_record(const SlotLists& lists, int i, const float* decays, const float* weights,
                                   bool linked) {
  const int slot = lists.slot(i);
  if (slot < 0) return SlotRecord::make(-1, 0, true, false, 0.0f, 0.0f);
  const int begin = lists.begin(i), end = lists.end(i);
  const int position = begin < end ? lists.position(begin) : -1;
  const bool single = end - begin == 1 && position >= 0;
  return SlotRecord::make(slot, max(position, 0), single, linked, decays == nullptr ? 1.0f : decays[i],
                          single ? weights[position] : 0.0f);
}

// The record of slot `i`: from the array of a chunk's records, or made on the spot where there is none.
__device__ inline SlotRecord record_of(const int4* records, const SlotLists& lists, int i, const float* decays,
                                       const float* weights) {
  if (i >= lists.most) return {SlotRecord::make(-1, 0, true, false, 0.0f, 0.0f)};
  return {records != nullptr ? records[i] : make_record(lists, i, decays, weights, false)};
}

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
