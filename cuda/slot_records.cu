// Records of the movers: what they need to know of each slot of each chunk, in 16 bytes at the position of the
// slot's first entry, so that the work on a row waits for one look-up and not for four in a row. A thread a slot
// and a position; bound by latency, so that the slots of a block are looked up in the part of the other list that
// they span, which the block finds together.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWindow = 1024;  // slots of the other list that a block takes into shared memory

struct Params {
  const int32_t *ids, *slots, *starts, *order, *other, *other_starts, *other_order;
  const float *decay, *weights;
  int4* records;
  int64_t stored_chunks, stored_tokens, tokens, first_chunk;
  int chunks, most, other_most, positions, per_token, other_per_token, chunk, num_slots;
  bool reads;
};

// The part of `list` that can hold slots first .. last; all of the block come here. Where it fits it is copied to
// `window`. `offset` receives where the part begins.
__device__ SlotLists part_between(const SlotLists& list, unsigned first, unsigned last, int32_t* window, int* offset) {
  const int step = (list.most + kThreads - 1) / kThreads, sampled = static_cast<int>(threadIdx.x) * step;
  const unsigned sample = sampled < list.most ? static_cast<unsigned>(list.slots[sampled]) : 0xffffffffu;
  const int before = __syncthreads_count(sampled < list.most && sample < first);
  const int until = __syncthreads_count(sampled < list.most && sample <= last);
  const int low = max(0, (before - 1) * step), size = min(list.most, until * step) - low;
  for (int k = threadIdx.x; size <= kWindow && k < size; k += kThreads) window[k] = list.slots[low + k];
  __syncthreads();
  *offset = low;
  return {size <= kWindow ? window : list.slots + low, nullptr, nullptr, max(size, 0), 0, list.num_slots};
}

__global__ void __launch_bounds__(kThreads) records_kernel(const __grid_constant__ Params a) {
  __shared__ int32_t window[kWindow];
  const int64_t task = blockIdx.x, p = task / a.chunks, n = task % a.chunks, chunk = p * a.stored_chunks + n;
  const int i0 = static_cast<int>(blockIdx.y) * kThreads;
  const int i = i0 + static_cast<int>(threadIdx.x);  // a position, and the index of a slot
  const int64_t first_token = (a.first_chunk + n) * a.chunk;
  const int entries = static_cast<int>(min(static_cast<int64_t>(a.chunk), a.tokens - first_token)) * a.per_token;
  const SlotLists lists{a.slots + chunk * a.most,
                        a.starts + chunk * (a.most + 1),
                        a.order + chunk * a.positions,
                        a.most,
                        entries,
                        a.num_slots};
  int4* records = a.records + chunk * a.positions;
  if (i < entries) {
    const int id = a.ids[(p * a.tokens + first_token) * a.per_token + i];
    if (static_cast<unsigned>(id) >= static_cast<unsigned>(a.num_slots)) records[i] = SlotRecord::none().bits;
  }
  const int slot = lists.slot(i);
  int link = -1;  // in the other list
  if (a.other != nullptr && lists.slot(i0) >= 0) {
    const SlotLists other{a.other + chunk * a.other_most,
                          a.other_starts + chunk * (a.other_most + 1),
                          a.other_order + chunk * a.chunk * a.other_per_token,
                          a.other_most,
                          entries / a.per_token * a.other_per_token,
                          a.num_slots};
    // Past the last slot comes -1, which compares as the largest.
    const int last = lists.slot(min(i0 + kThreads, a.most) - 1);
    int offset = 0;
    const SlotLists part = part_between(other, lists.slot(i0), last, window, &offset);
    const int found = slot >= 0 ? part.find(slot) : -1;
    if (found >= 0) link = other.position(other.begin(offset + found));
  }
  if (slot < 0) return;
  const int begin = lists.begin(i), end = lists.end(i);
  const float* weights = a.weights + (p * a.stored_tokens + n * a.chunk) * a.per_token;
  int next = -1;
  for (int e = end - 1; e >= begin; --e) {
    const int position = lists.position(e);
    if (position < 0) continue;
    SlotRecord record = SlotRecord::entry(next, weights[position]);
    if (e == begin) {
      record.bits.x = slot;
      record.bits.y = i | (next < 0 ? SlotRecord::kSingle : 0) | (link >= 0 ? SlotRecord::kLinked : 0);
      if (!a.reads) {
        record.bits.z = __float_as_int(a.decay[chunk * a.most + i]);
        if (link >= 0 || next >= 0) record.bits.w = link >= 0 ? link : next;
      }
    }
    records[position] = record.bits;
    next = position;
  }
}

}  // namespace

cudaError_t slot_records(const Inputs& in, const Chunks& c, const Shape& s, RecordsOf of, void* records, int64_t count,
                         Launch where) {
  Params a = {};
  const bool reads = of == RecordsOf::reads;
  a.ids = reads ? in.q_idx : in.k_idx;
  a.slots = reads ? c.read_slots : c.slots;
  a.starts = reads ? c.read_starts : c.starts;
  a.order = reads ? c.read_order : c.order;
  if (of != RecordsOf::writes) {
    a.other = reads ? c.slots : c.read_slots;
    a.other_starts = reads ? c.starts : c.read_starts;
    a.other_order = reads ? c.order : c.read_order;
  }
  a.reads = reads;
  a.decay = static_cast<const float*>(c.decay);
  a.weights = static_cast<const float*>(of == RecordsOf::writes ? c.k_carry : reads ? c.q_eff : c.k_eff);
  a.records = static_cast<int4*>(records);
  a.stored_chunks = s.stored_chunks;
  a.stored_tokens = s.stored_tokens;
  a.most = static_cast<int>(reads ? s.read_slots : s.write_slots);
  a.other_most = static_cast<int>(reads ? s.write_slots : s.read_slots);
  a.per_token = static_cast<int>(reads ? s.reads : s.writes);
  a.other_per_token = static_cast<int>(reads ? s.writes : s.reads);
  a.chunk = static_cast<int>(s.chunk);
  a.num_slots = static_cast<int>(s.slots);
  a.tokens = s.tokens;
  a.first_chunk = s.first_chunk;
  a.chunks = static_cast<int>(count);
  a.positions = a.chunk * a.per_token;  // at least as many as slots
  const int64_t pieces = div_up(a.positions, kThreads);
  return launch(records_kernel, dim3(static_cast<unsigned>(s.streams * count), static_cast<unsigned>(pieces)), kThreads,
                0, where, a);
}

}  // namespace sdm::gpu
