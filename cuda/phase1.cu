// Phase 1: what a chunk's ids, weights and gates say without the bank (section 3 of the
// specification). One block a chunk: the entries are sorted by slot in shared memory, the distinct
// slots listed, then each warp owns a token and walks the earlier entries of its entries' slots.
// Bound by latency: dependent look-ups in the lists, which the first-level cache holds.
//
// Decays are exponentials of sums of only the gates in between. A row of A or QK is summed by the one
// warp that owns it, token by token, so the order of every sum is fixed.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kDigits = 256;

struct Params {
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val;
  const float* g;
  float *a, *qk, *k_eff, *k_carry, *q_eff, *decay;
  int32_t *slots, *starts, *order, *read_slots, *read_starts, *read_order, *written;
  int64_t tokens, stored_tokens, stored_chunks, first_chunk;
  int chunk, writes, reads, gates, write_slots, read_slots_most, num_slots, bits;
  int chunks;        // side by side
  int shared_slots;  // that fit a copy at copy_offset
  int copy_offset;
  int shared_entries;  // more entries than this are sorted in the memory of the list they become
  Divider by_writes;
};

struct Scratch {
  uint32_t* counts;  // [kWarps][kDigits]
  int32_t* tile;     // [kThreads + 1]
  int32_t* sums;     // [kWarps + 1]
};

// Exclusive sum over the block; `total` receives the sum.
__device__ int block_prefix(int x, int32_t* sums, int* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += y;
  }
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int s = sums[w];
    before += w < warp ? s : 0;
    all += s;
  }
  *total = all;
  __syncthreads();
  return before + inclusive - x;
}

// Stable radix sort of the positions of valid ids by id; the result is in `second` if `passes` is odd.
__device__ int sort_positions(const int32_t* ids, int entries, int num_slots, int passes, uint16_t* first,
                              uint16_t* second, const Scratch& scratch) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t* counts = scratch.counts + warp * kDigits;
  int n = entries;
  const uint16_t* in = first;
  uint16_t* out = second;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = 8 * pass;
    const int segment = ((n + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int begin = warp * segment, end = min(n, begin + segment);
    for (int d = lane; d < kDigits; d += 32) counts[d] = 0;
    __syncwarp();
    const auto read = [&](int i, int* position) {
      if (i >= end) return kDigits;
      *position = pass == 0 ? i : in[i];
      const int id = ids[*position];
      if (pass == 0 && static_cast<unsigned>(id) >= static_cast<unsigned>(num_slots)) return kDigits;
      return (id >> shift) & (kDigits - 1);
    };
    for (int i = begin + lane; i - lane < end; i += 32) {
      int position = 0;
      const int digit = read(i, &position);
      const unsigned same = __match_any_sync(0xffffffffu, digit);
      if (digit < kDigits && lane == __ffs(same) - 1) counts[digit] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    int sum = 0;
    if (threadIdx.x < kDigits) {
      for (int w = 0; w < kWarps; ++w) sum += scratch.counts[w * kDigits + threadIdx.x];
    }
    int total = 0;
    uint32_t start = block_prefix(sum, scratch.sums, &total);
    if (threadIdx.x < kDigits) {
      for (int w = 0; w < kWarps; ++w) {
        uint32_t* count = scratch.counts + w * kDigits + threadIdx.x;
        const uint32_t here = *count;
        *count = start;
        start += here;
      }
    }
    __syncthreads();
    for (int i = begin + lane; i - lane < end; i += 32) {
      int position = 0;
      const int digit = read(i, &position);
      const unsigned same = __match_any_sync(0xffffffffu, digit);
      const int rank = __popc(same & ((1u << lane) - 1));
      if (digit < kDigits) out[counts[digit] + rank] = static_cast<uint16_t>(position);
      __syncwarp();
      if (digit < kDigits && rank == 0) counts[digit] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    n = total;
    uint16_t* next = const_cast<uint16_t*>(in);
    in = out;
    out = next;
  }
  return n;
}

// Lists the distinct slots of sorted positions. `sorted` may be the second half of `order`.
__device__ int list_slots(const int32_t* ids, const uint16_t* sorted, int count, int entries, int most, int32_t* slots,
                          int32_t* starts, int32_t* order, const Scratch& scratch) {
  int distinct = 0;
  if (threadIdx.x == 0) scratch.tile[0] = -1;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + threadIdx.x;
    const int position = i < count ? sorted[i] : 0;
    const int id = i < count ? ids[position] : -1;
    scratch.tile[threadIdx.x + 1] = id;
    __syncthreads();
    const bool head = i < count && scratch.tile[threadIdx.x] != id;
    int total = 0;
    const int index = distinct + block_prefix(head, scratch.sums, &total);
    if (i < count) order[i] = position;
    if (head) {
      slots[index] = id;
      starts[index] = i;
    }
    distinct += total;
    if (threadIdx.x == kThreads - 1) scratch.tile[0] = id;
    __syncthreads();
  }
  for (int i = count + threadIdx.x; i < entries; i += kThreads) order[i] = -1;
  for (int i = distinct + threadIdx.x; i <= most; i += kThreads) {
    if (i < most) slots[i] = -1;
    starts[i] = count;
  }
  __syncthreads();
  return distinct;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 3) phase1_kernel(Params a) {
  extern __shared__ __align__(16) unsigned char shared[];
  Scratch scratch;
  scratch.counts = reinterpret_cast<uint32_t*>(shared);
  scratch.tile = reinterpret_cast<int32_t*>(scratch.counts + kWarps * kDigits);
  scratch.sums = scratch.tile + kThreads + 1;
  uint16_t* buffers = reinterpret_cast<uint16_t*>(scratch.sums + kWarps + 1);

  const int64_t p = blockIdx.x / a.chunks, index = blockIdx.x % a.chunks;
  const int64_t n = a.first_chunk + index, stored = p * a.stored_chunks + index;
  const int chunk = a.chunk, writes = a.writes, reads = a.reads;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(chunk), a.tokens - n * chunk));
  const int64_t token = p * a.tokens + n * chunk;
  const int64_t stored_token = p * a.stored_tokens + index * chunk;
  const int32_t* k_idx = a.k_idx + token * writes;
  const int32_t* q_idx = a.q_idx + token * reads;
  const T* k_val = static_cast<const T*>(a.k_val) + token * writes;
  const T* q_val = static_cast<const T*>(a.q_val) + token * reads;
  const float* g = a.g + token * a.gates;
  int32_t* slots = a.slots + stored * a.write_slots;
  int32_t* starts = a.starts + stored * (a.write_slots + 1);
  int32_t* order = a.order + stored * chunk * writes;
  int32_t* read_order = a.read_order + stored * chunk * reads;

  // Sort and list, writes then reads.
  const int passes = a.bits <= 8 ? 1 : (a.bits + 7) / 8;
  const auto sort_and_list = [&](const int32_t* ids, int per_token, int most, int32_t* slots, int32_t* starts,
                                 int32_t* order) {
    const int entries = chunk * per_token;
    uint16_t* low = entries <= a.shared_entries ? buffers : reinterpret_cast<uint16_t*>(order);
    uint16_t* high = low + entries;
    // The last pass must write `high`, which may be the second half of `order`.
    uint16_t* first = passes % 2 ? low : high;
    uint16_t* second = passes % 2 ? high : low;
    const int count = sort_positions(ids, tokens * per_token, a.num_slots, passes, first, second, scratch);
    return list_slots(ids, high, count, entries, most, slots, starts, order, scratch);
  };
  const int distinct = sort_and_list(k_idx, writes, a.write_slots, slots, starts, order);
  sort_and_list(q_idx, reads, a.read_slots_most, a.read_slots + stored * a.read_slots_most,
                a.read_starts + stored * (a.read_slots_most + 1), read_order);

  const auto gate = [&](int t, int position) { return static_cast<double>(a.gates == 1 ? g[t] : g[position]); };
  // The decay of each slot over the chunk.
  for (int i = threadIdx.x; i < a.write_slots; i += kThreads) {
    double sum = 0;
    if (i < distinct) {
      int last = -1;
      for (int e = starts[i]; e < starts[i + 1]; ++e) {
        const int t = a.by_writes(order[e]);
        if (t != last) sum += gate(t, order[e]);
        last = t;
      }
    }
    a.decay[stored * a.write_slots + i] = expf(static_cast<float>(sum));
  }

  // A warp owns a token: its entries, and its rows of A and QK.
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float* row = reinterpret_cast<float*>(scratch.counts) + warp * kDigits;  // [C], C <= 256
  // Look-ups of slots go to a copy in shared memory where it fits.
  const bool copied = distinct <= a.shared_slots;
  int32_t* copy = reinterpret_cast<int32_t*>(shared + a.copy_offset);
  for (int i = threadIdx.x; copied && i < distinct; i += kThreads) copy[i] = slots[i];
  const SlotLists lists{copied ? copy : slots, starts, order, distinct, chunk * writes, a.num_slots};
  // Adds weight * (weights of an earlier token of the slot) * decay to `row`, for the tokens that end
  // at the list's entry `i` and before. All lanes side by side, the latest token of all lanes first.
  const auto add_pairs = [&](bool has, float weight, int i, int begin, double between) {
    has = has && i >= begin;
    int t = has ? a.by_writes(order[i]) : -1;
    while (true) {
      const int latest = __reduce_max_sync(0xffffffffu, has ? t : -1);
      if (latest < 0) break;
      float value = 0;
      if (has && t == latest) {
        float earlier = 0;
        int position = 0;
        while (has && t == latest) {
          position = order[i];
          earlier += to_float(k_val[position]);
          --i;
          has = i >= begin;
          if (has) t = a.by_writes(order[i]);
        }
        value = weight * earlier * expf(static_cast<float>(between));
        between += gate(latest, position);
      }
      value = warp_sum(value);
      if (lane == 0) row[latest] += value;
    }
    __syncwarp();
  };
  __syncthreads();
  for (int t = warp; t < chunk; t += kWarps) {
    for (int j = lane; j < chunk; j += 32) row[j] = 0;
    __syncwarp();
    int valid = 0;
    for (int w0 = 0; t < tokens && w0 < writes; w0 += 32) {
      const int w = w0 + lane, entry = t * writes + w;
      const int id = w < writes ? k_idx[entry] : -1;
      const bool ok = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots);
      valid += __popc(__ballot_sync(0xffffffffu, ok));
      double since = 0, after = 0, own_gate = 0;
      float kappa = 0, weight = 0;
      int own = -1, begin = 0;
      bool first = false;
      if (ok) {
        kappa = to_float(k_val[entry]);
        const int index = lists.find(id);
        begin = starts[index];
        const int end = starts[index + 1];
        int last = -1;
        for (int e = begin; e < end; ++e) {
          const int position = order[e], te = a.by_writes(position);
          if (te != last) {
            const double x = gate(te, position);
            if (te <= t)
              since += x;
            else
              after += x;
            if (te == t) {
              own = e;
              own_gate = x;
              first = position == entry;
            }
          }
          if (te == t && first) weight += to_float(k_val[position]);
          last = te;
        }
      }
      if (w < writes) {
        a.k_eff[(stored_token + t) * writes + w] = ok ? kappa * expf(static_cast<float>(since)) : 0.0f;
        a.k_carry[(stored_token + t) * writes + w] = ok ? kappa * expf(static_cast<float>(after)) : 0.0f;
      }
      add_pairs(first, weight, own - 1, begin, own_gate);
    }
    if (t < tokens && lane == 0) a.written[stored_token + t] = valid;
    float* out = a.a + (stored * chunk + t) * chunk;
    for (int j = lane; j < chunk; j += 32) {
      out[j] = row[j];
      row[j] = 0;
    }
    __syncwarp();
    for (int r0 = 0; t < tokens && r0 < reads; r0 += 32) {
      const int r = r0 + lane, entry = t * reads + r;
      const int id = r < reads ? q_idx[entry] : -1;
      const bool ok = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots);
      float q = 0;
      double since = 0;
      int begin = 0, i = -1;
      if (ok) {
        q = to_float(q_val[entry]);
        const int index = lists.find(id);
        if (index >= 0) {
          begin = starts[index];
          i = begin - 1;
          const int end = starts[index + 1];
          int last = -1;
          for (int e = begin; e < end; ++e) {
            const int position = order[e], te = a.by_writes(position);
            if (te > t) break;
            if (te != last) since += gate(te, position);
            last = te;
            i = e;
          }
        }
      }
      const bool written = i >= begin && ok;
      if (r < reads) {
        a.q_eff[(stored_token + t) * reads + r] = written ? q * expf(static_cast<float>(since)) : q;
      }
      add_pairs(written, q, i, begin, 0.0);
    }
    out = a.qk + (stored * chunk + t) * chunk;
    for (int j = lane; j < chunk; j += 32) out[j] = row[j];
    __syncwarp();
  }
}

}  // namespace

cudaError_t phase1(const Forward& f, int64_t count, Launch where) {
  const Shape& s = f.shape;
  const Chunks& c = f.chunks;
  int bits = 0;
  while (bits < 31 && (s.slots - 1) >> bits > 0) ++bits;
  const size_t fixed = sizeof(uint32_t) * (kWarps * kDigits + kThreads + 1 + kWarps + 1);
  const int shared_entries = static_cast<int>((shared_limit() - fixed - 16) / (2 * sizeof(uint16_t)));
  const auto fitting = [&](int64_t per_token) {
    return s.chunk * per_token <= shared_entries ? s.chunk * per_token : 0;
  };
  // Two 16-bit positions, or a slot, an entry.
  const int64_t most = std::max(fitting(s.writes), fitting(s.reads));
  const size_t copy_offset = (fixed + 15) / 16 * 16;
  const Params params{f.in.k_idx,
                      f.in.q_idx,
                      f.in.k_val,
                      f.in.q_val,
                      static_cast<const float*>(f.in.g),
                      static_cast<float*>(c.a),
                      static_cast<float*>(c.qk),
                      static_cast<float*>(c.k_eff),
                      static_cast<float*>(c.k_carry),
                      static_cast<float*>(c.q_eff),
                      static_cast<float*>(c.decay),
                      c.slots,
                      c.starts,
                      c.order,
                      c.read_slots,
                      c.read_starts,
                      c.read_order,
                      c.writes,
                      s.tokens,
                      s.stored_tokens,
                      s.stored_chunks,
                      s.first_chunk,
                      static_cast<int>(s.chunk),
                      static_cast<int>(s.writes),
                      static_cast<int>(s.reads),
                      static_cast<int>(s.gates),
                      static_cast<int>(s.write_slots),
                      static_cast<int>(s.read_slots),
                      static_cast<int>(s.slots),
                      bits,
                      static_cast<int>(count),
                      static_cast<int>(most),
                      static_cast<int>(copy_offset),
                      shared_entries,
                      Divider(s.writes)};
  const auto kernel = f.dtype == DType::bf16 ? phase1_kernel<bf16> : phase1_kernel<float>;
  return launch(kernel, dim3(s.streams * count), kThreads, copy_offset + 2 * sizeof(uint16_t) * most, where, params);
}

}  // namespace sdm::gpu
