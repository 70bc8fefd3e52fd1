// Records of the movers: what they need to know of each slot of each chunk, in 16 bytes, so that the work on
// a row waits for one look-up and not for four in a row. One thread a slot; bound by latency.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;

struct Params {
  const int32_t *slots, *starts, *order, *other;
  const float *decay, *weights;
  int4* records;
  int64_t stored_chunks, stored_tokens, tokens, first_chunk, count;
  int chunks, most, other_most, per_token, chunk, num_slots;
};

__global__ void __launch_bounds__(kThreads) records_kernel(const __grid_constant__ Params a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= a.count) return;
  const int64_t task = index / a.most, p = task / a.chunks, n = task % a.chunks, chunk = p * a.stored_chunks + n;
  const int i = static_cast<int>(index % a.most);
  const int64_t tokens = min(static_cast<int64_t>(a.chunk), a.tokens - (a.first_chunk + n) * a.chunk);
  const int entries = static_cast<int>(tokens) * a.per_token;
  const SlotLists lists{a.slots + chunk * a.most,
                        a.starts + chunk * (a.most + 1),
                        a.order + chunk * a.chunk * a.per_token,
                        a.most,
                        entries,
                        a.num_slots};
  bool linked = false;
  if (a.other != nullptr && lists.slot(i) >= 0) {
    const SlotLists other{a.other + chunk * a.other_most, nullptr, nullptr, a.other_most, 0, a.num_slots};
    linked = other.find(lists.slot(i)) >= 0;
  }
  a.records[chunk * a.most + i] = make_record(lists, i, a.decay == nullptr ? nullptr : a.decay + chunk * a.most,
                                              a.weights + (p * a.stored_tokens + n * a.chunk) * a.per_token, linked);
}

}  // namespace

cudaError_t slot_records(const Chunks& c, const Shape& s, RecordsOf of, void* records, int64_t count, Launch where) {
  Params a = {};
  const bool reads = of == RecordsOf::reads;
  a.slots = reads ? c.read_slots : c.slots;
  a.starts = reads ? c.read_starts : c.starts;
  a.order = reads ? c.read_order : c.order;
  if (of != RecordsOf::writes) a.other = reads ? c.slots : c.read_slots;
  a.decay = reads ? nullptr : static_cast<const float*>(c.decay);
  a.weights = static_cast<const float*>(of == RecordsOf::writes ? c.k_carry : reads ? c.q_eff : c.k_eff);
  a.records = static_cast<int4*>(records);
  a.stored_chunks = s.stored_chunks;
  a.stored_tokens = s.stored_tokens;
  a.most = static_cast<int>(reads ? s.read_slots : s.write_slots);
  a.other_most = static_cast<int>(reads ? s.write_slots : s.read_slots);
  a.per_token = static_cast<int>(reads ? s.reads : s.writes);
  a.chunk = static_cast<int>(s.chunk);
  a.num_slots = static_cast<int>(s.slots);
  a.tokens = s.tokens;
  a.first_chunk = s.first_chunk;
  a.chunks = static_cast<int>(count);
  a.count = s.streams * count * a.most;
  return launch(records_kernel, dim3(div_up(a.count, kThreads)), kThreads, 0, where, a);
}

}  // namespace sdm::gpu
