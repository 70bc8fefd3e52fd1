// The distinct slots of a chunk and their entries, as Phase 1 lists them.
#pragma once

#include <cstdint>

namespace sdm::gpu {

inline constexpr unsigned kAll = 0xffffffffu;  // lanes of a warp

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

// What a mover needs to know of an entry, in one 16-byte load.
// The first entry of a slot: the slot, its index in the lists, and
// - of writes: the slot's decay over the chunk, and the weight of its only entry or, where it has several, the
//   position of the next or, where the chunk reads it too, the position of its first read;
// - of reads: the position of the slot's next read (-1: none), and the weight.
// Any other: no slot (-1), the position of the slot's next entry, and the weight.
struct SlotRecord {
  static constexpr int kSingle = 1 << 16;  // the slot has no other entry
  static constexpr int kLinked = 1 << 17;  // the slot is in the other list too
  static constexpr int kItemShift = 18;    // above: the entry's number in a warp's records

  int4 bits;

  __device__ static SlotRecord none() { return {make_int4(-1, 0, -1, 0)}; }
  __device__ static SlotRecord entry(int next, float weight) {
    return {make_int4(-1, 0, next, __float_as_int(weight))};
  }
  __device__ int slot() const { return bits.x; }
  __device__ int index() const { return bits.y & 0xffff; }
  __device__ bool single() const { return bits.y & kSingle; }
  __device__ bool linked() const { return bits.y & kLinked; }
  __device__ int item() const { return bits.y >> kItemShift; }
  __device__ float decay() const { return __int_as_float(bits.z); }
  __device__ int next() const { return bits.z; }
  __device__ float weight() const { return __int_as_float(bits.w); }
  __device__ int link() const { return bits.w; }
};

// The records of a chunk, in the order of its tokens: a slot's is at the position of its first entry, so that
// those side by side need the same token's row. Without the array they come from the lists, slot by slot.
struct SlotRecords {
  const int4* stored;  // [entries], or null
  SlotLists lists;
  const float* weights;
  const float* decays;  // null: 1

  __device__ int count() const { return stored != nullptr ? lists.entries : lists.most; }
  __device__ SlotRecord at(int j) const {
    if (j >= count()) return SlotRecord::none();
    if (stored != nullptr) return {stored[j]};
    return {make_int4(lists.slot(j), j, __float_as_int(decays == nullptr ? 1.0f : decays[j]), 0)};
  }
  // Calls f(position, weight) for the entries of a written slot whose record is at `position`.
  template <class F>
  __device__ void for_writes(const SlotRecord& record, int position, F f) const {
    if (stored != nullptr) f(position, weights[position]);
    for_further_writes(record, f);
  }
  // The same of all but the first entry; without records, of all.
  template <class F>
  __device__ void for_further_writes(const SlotRecord& record, F f) const {
    if (stored != nullptr && record.single()) return;
    if (stored == nullptr || record.linked()) return for_list(record, stored != nullptr, f);
    for (int next = record.link(); next >= 0;) {
      const SlotRecord other{stored[next]};
      f(next, other.weight());
      next = other.next();
    }
  }
  // The same of a slot that is read, from the position of its first read.
  template <class F>
  __device__ void for_reads(const SlotRecord& record, int position, F f) const {
    if (stored == nullptr) return for_list(record, 0, f);
    while (position >= 0) {
      const SlotRecord entry{stored[position]};
      f(position, entry.weight());
      position = entry.next();
    }
  }

 private:
  template <class F>
  __device__ void for_list(const SlotRecord& record, int skipped, F f) const {
    for (int e = lists.begin(record.index()) + skipped; e < lists.end(record.index()); ++e) {
      const int position = lists.position(e);
      if (position >= 0) f(position, weights[position]);
    }
  }
};

// The records of up to 32 entries side by side, which a warp works on: first those of slots with this entry only,
// whose work is short, then the others.
struct WarpRecords {
  static constexpr int kItems = 32;
  static constexpr int kMostGroup = 8;
  static constexpr int kRoom = kItems + kMostGroup;

  SlotRecord* shared;  // [kRoom], the warp's own: the simple ones, empty ones up to `others_begin`, the others
  int first;           // entry
  int simple, others;  // how many
  int others_begin;

  // The warp takes entries first .. first + count. `linked`: of slots in both lists too. The simple ones are filled up
  // to whole groups, the others to whole `rows`, a divisor of `group`.
  __device__ WarpRecords(const SlotRecords& all, SlotRecord* shared, int first, int count, bool linked, int group,
                         int rows)
      : shared(shared), first(first) {
    const int item = threadIdx.x & 31;
    SlotRecord mine = item < count ? all.at(first + item) : SlotRecord::none();
    const bool on = mine.slot() >= 0 && (linked || !mine.linked()), is_simple = on && mine.single() && !mine.linked();
    const unsigned simple_lanes = __ballot_sync(0xffffffffu, is_simple);
    const unsigned other_lanes = __ballot_sync(0xffffffffu, on && !is_simple), before = (1u << item) - 1;
    simple = __popc(simple_lanes);
    others = __popc(other_lanes);
    others_begin = (simple + group - 1) / group * group;
    const int end = others_begin + others;
    mine.bits.y |= item << SlotRecord::kItemShift;
    if (is_simple) shared[__popc(simple_lanes & before)] = mine;
    if (on && !is_simple) shared[others_begin + __popc(other_lanes & before)] = mine;
    if (simple + item < others_begin) shared[simple + item] = SlotRecord::none();
    if (end + item < (end + rows - 1) / rows * rows) shared[end + item] = SlotRecord::none();
    __syncwarp();
  }
  __device__ SlotRecord simple_at(int i) const { return i < simple ? shared[i] : SlotRecord::none(); }
  __device__ SlotRecord other_at(int i) const { return i < others ? shared[others_begin + i] : SlotRecord::none(); }
  __device__ int position(const SlotRecord& record) const { return first + record.item(); }
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
