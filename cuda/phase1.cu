// Phase 1: what a chunk's ids, weights and gates say without the bank (section 3 of the specification), in two
// kernels. The first, a block a chunk, sorts the entries by slot in shared memory, lists the distinct slots, and marks
// every entry with its written slot's index. In the second a warp owns a token and walks the earlier entries of its
// entries' slots. Bound by latency: dependent look-ups in the lists.
//
// Decays are exponentials of sums of only the gates in between. A row of A or QK is summed by the one
// warp that owns it, in an order that only the ids decide.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kDigits = 256;
constexpr int kUnroll = 4;
constexpr int kPairThreads = 256;
constexpr int kPairWarps = kPairThreads / 32;

struct Params {
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val;
  const float* g;
  float *a, *qk, *k_eff, *k_carry, *q_eff, *decay;
  int32_t *slots, *starts, *order, *read_slots, *read_starts, *read_order, *written;
  int64_t tokens, stored_tokens, stored_chunks, first_chunk, rows;
  int chunk, writes, reads, gates, write_slots, read_slots_most, num_slots, bits;
  int chunks;          // side by side
  int shared_entries;  // more entries than this are sorted in the memory of the list they become
  Divider by_writes;

  // Between the kernels: the indices of the entries' slots in `slots` (-1: not written), where the results of the
  // same entries will be.
  __device__ int32_t* write_marks() const { return reinterpret_cast<int32_t*>(k_carry); }
  __device__ int32_t* read_marks() const { return reinterpret_cast<int32_t*>(q_eff); }
};

// One of the chunks side by side.
struct Place {
  int64_t p, index, n, stored, token, stored_token;
  int tokens;

  __device__ Place(const Params& a, int64_t task)
      : p(task / a.chunks),
        index(task % a.chunks),
        n(a.first_chunk + index),
        stored(p * a.stored_chunks + index),
        token(p * a.tokens + n * a.chunk),
        stored_token(p * a.stored_tokens + index * a.chunk),
        tokens(static_cast<int>(min(static_cast<int64_t>(a.chunk), a.tokens - n * a.chunk))) {}
};

template <int kThreads>
struct Scratch {
  static constexpr int kWarps = kThreads / 32;
  uint32_t counts[kWarps][kDigits];
  int32_t sums[kWarps];
};

// Exclusive sum over the block; `total` receives the sum.
template <int kWarps>
__device__ int block_prefix(int x, int32_t (&sums)[kWarps], int* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int y = __shfl_up_sync(kAll, inclusive, offset);
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

// The part of 0 .. n that a warp takes: whole pieces of 32.
template <int kWarps>
struct Segment {
  int begin, end;
  __device__ explicit Segment(int n) {
    const int length = ((n + kWarps - 1) / kWarps + 31) / 32 * 32;
    begin = static_cast<int>(threadIdx.x >> 5) * length;
    end = min(n, begin + length);
  }
};

// Stable radix sort of the positions of valid ids by id; the result is in `second` if `passes` is odd.
template <int kThreads>
__device__ int sort_positions(const int32_t* ids, int entries, int num_slots, int passes, int digit_bits,
                              uint16_t* first, uint16_t* second, Scratch<kThreads>& scratch) {
  constexpr int kWarps = Scratch<kThreads>::kWarps;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mask = (1 << digit_bits) - 1;
  uint32_t* counts = scratch.counts[warp];
  int n = entries;
  uint16_t *in = first, *out = second;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = digit_bits * pass;
    const Segment<kWarps> segment(n);
    for (int d = lane; d < kDigits; d += 32) counts[d] = 0;
    __syncwarp();
    // Positions and digits (kDigits: not valid) of the lane's of kUnroll pieces of 32.
    const auto read = [&](int base, int (&position)[kUnroll], int (&digit)[kUnroll]) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const int i = base + 32 * k + lane;
        position[k] = i < segment.end ? (pass == 0 ? i : in[i]) : -1;
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const int id = position[k] >= 0 ? ids[position[k]] : -1;
        digit[k] = static_cast<unsigned>(id) < static_cast<unsigned>(num_slots) ? (id >> shift) & mask : kDigits;
      }
    };
    for (int base = segment.begin; base < segment.end; base += 32 * kUnroll) {
      int position[kUnroll], digit[kUnroll];
      read(base, position, digit);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (digit[k] < kDigits) atomicAdd(&counts[digit[k]], 1u);
      }
    }
    __syncthreads();
    int sum = 0;
    if (threadIdx.x < kDigits) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += scratch.counts[w][threadIdx.x];
    }
    int total = 0;
    uint32_t start = block_prefix(sum, scratch.sums, &total);
    if (threadIdx.x < kDigits) {
#pragma unroll 8
      for (int w = 0; w < kWarps; ++w) {
        const uint32_t here = scratch.counts[w][threadIdx.x];
        scratch.counts[w][threadIdx.x] = start;
        start += here;
      }
    }
    __syncthreads();
    for (int base = segment.begin; base < segment.end; base += 32 * kUnroll) {
      int position[kUnroll], digit[kUnroll];
      read(base, position, digit);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const unsigned same = __match_any_sync(kAll, digit[k]);
        const int rank = __popc(same & ((1u << lane) - 1));
        if (digit[k] < kDigits) out[counts[digit[k]] + rank] = static_cast<uint16_t>(position[k]);
        __syncwarp();
        if (digit[k] < kDigits && rank == 0) counts[digit[k]] += __popc(same);
        __syncwarp();
      }
    }
    __syncthreads();
    n = total;
    uint16_t* next = in;
    in = out;
    out = next;
  }
  return n;
}

// Lists the distinct slots of `count` sorted positions, and calls mark(position, slot, index of the slot) for each.
// `sorted` may be the second half of `order`: then an entry is written over those that come before it only.
template <int kThreads, class Mark>
__device__ int list_slots(const int32_t* ids, const uint16_t* sorted, int count, int entries, int most, int32_t* slots,
                          int32_t* starts, int32_t* order, bool in_order, Scratch<kThreads>& scratch, Mark mark) {
  constexpr int kWarps = Scratch<kThreads>::kWarps;
  const int lane = threadIdx.x & 31;
  const Segment<kWarps> segment(count);
  // Calls f(i, position, id, lanes whose entry is the first of its slot) for pieces of 32 entries.
  const auto walk = [&](auto f) {
    int last = segment.begin > 0 && segment.begin < segment.end ? ids[sorted[segment.begin - 1]] : -1;
    for (int base = segment.begin; base < segment.end; base += 32 * kUnroll) {
      int position[kUnroll], id[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        const int i = base + 32 * k + lane;
        position[k] = i < segment.end ? sorted[i] : -1;
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) id[k] = position[k] >= 0 ? ids[position[k]] : -1;
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        int before = __shfl_up_sync(kAll, id[k], 1);
        if (lane == 0) before = last;
        last = __shfl_sync(kAll, id[k], 31);
        f(base + 32 * k + lane, position[k], id[k], __ballot_sync(kAll, position[k] >= 0 && id[k] != before));
      }
    }
  };
  int here = 0, distinct = 0;
  walk([&](int, int, int, unsigned heads) { here += __popc(heads); });
  int seen = block_prefix(lane == 0 ? here : 0, scratch.sums, &distinct);
  seen = __shfl_sync(kAll, seen, 0);
  walk([&](int i, int position, int id, unsigned heads) {
    const int index = seen + __popc(heads & (kAll >> (31 - lane))) - 1;
    if (heads >> lane & 1) {
      slots[index] = id;
      starts[index] = i;
    }
    if (position >= 0) mark(position, id, index);
    seen += __popc(heads);
  });
  if (in_order) __syncthreads();
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + threadIdx.x, position = i < count ? sorted[i] : 0;
    if (in_order) __syncthreads();
    if (i < count) order[i] = position;
  }
  if (in_order) __syncthreads();
  for (int i = count + threadIdx.x; i < entries; i += kThreads) order[i] = -1;
  for (int i = distinct + threadIdx.x; i <= most; i += kThreads) {
    if (i < most) slots[i] = -1;
    starts[i] = count;
  }
  __syncthreads();
  return distinct;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 1024 ? 2 : 1536 / kThreads)
    sort_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) unsigned char shared[];
  Scratch<kThreads>& scratch = *reinterpret_cast<Scratch<kThreads>*>(shared);
  uint16_t* buffers = reinterpret_cast<uint16_t*>(shared + sizeof(Scratch<kThreads>));
  const Place at(a, blockIdx.x);
  const int passes = a.bits <= 8 ? 1 : (a.bits + 7) / 8, digit_bits = max(1, (a.bits + passes - 1) / passes);
  // Sort and list, writes then reads.
  const auto sort_and_list = [&](const int32_t* ids, int per_token, int most, int32_t* slots, int32_t* starts,
                                 int32_t* order, auto mark) {
    const int entries = a.chunk * per_token;
    const bool in_order = entries > a.shared_entries;
    uint16_t* low = in_order ? reinterpret_cast<uint16_t*>(order) : buffers;
    uint16_t* high = low + entries;
    // The last pass must write `high`, which may be the second half of `order`.
    uint16_t* first = passes % 2 ? low : high;
    uint16_t* second = passes % 2 ? high : low;
    const int count =
        sort_positions(ids, at.tokens * per_token, a.num_slots, passes, digit_bits, first, second, scratch);
    return list_slots(ids, high, count, entries, most, slots, starts, order, in_order, scratch, mark);
  };
  int32_t* slots = a.slots + at.stored * a.write_slots;
  int32_t* write_marks = a.write_marks() + at.stored_token * a.writes;
  const int distinct = sort_and_list(
      a.k_idx + at.token * a.writes, a.writes, a.write_slots, slots, a.starts + at.stored * (a.write_slots + 1),
      a.order + at.stored * a.chunk * a.writes, [&](int position, int, int index) { write_marks[position] = index; });
  for (int i = distinct + threadIdx.x; i < a.write_slots; i += kThreads) a.decay[at.stored * a.write_slots + i] = 1.0f;
  const SlotLists written{slots, nullptr, nullptr, distinct, 0, a.num_slots};
  int32_t* read_marks = a.read_marks() + at.stored_token * a.reads;
  sort_and_list(a.q_idx + at.token * a.reads, a.reads, a.read_slots_most, a.read_slots + at.stored * a.read_slots_most,
                a.read_starts + at.stored * (a.read_slots_most + 1), a.read_order + at.stored * a.chunk * a.reads,
                [&](int position, int slot, int) { read_marks[position] = written.find(slot); });
}

template <class T>
__global__ void __launch_bounds__(kPairThreads, 5) pairs_kernel(const __grid_constant__ Params a) {
  extern __shared__ float rows[];  // [kPairWarps][C]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunk = a.chunk, writes = a.writes, reads = a.reads;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kPairWarps + warp;
  if (task >= a.rows) return;
  const Place at(a, task / chunk);
  const int t = static_cast<int>(task % chunk);
  const T* k_val = static_cast<const T*>(a.k_val) + at.token * writes;
  const float* g = a.g + at.token * a.gates;
  const int32_t* starts = a.starts + at.stored * (a.write_slots + 1);
  const int32_t* order = a.order + at.stored * chunk * writes;
  float* row = rows + warp * chunk;
  const auto gate = [&](int t, int position) { return static_cast<double>(a.gates == 1 ? g[t] : g[position]); };
  const auto clear_row = [&] {
    for (int j = lane; j < chunk; j += 32) row[j] = 0;
    __syncwarp();
  };
  const auto store_row = [&](float* squares) {
    float* out = squares + (at.stored * chunk + t) * chunk;
    __syncwarp();
    for (int j = lane; j < chunk; j += 32) out[j] = row[j];
    __syncwarp();
  };
  // Adds weight * (weights of an earlier token of the slot) * decay to `row`, for the tokens that end
  // at the list's entry `i` and before, of all lanes side by side.
  const auto add_pairs = [&](bool has, float weight, int i, int begin, double between) {
    has = has && i >= begin;
    while (__any_sync(kAll, has)) {
      int earlier = -1;
      float value = 0;
      if (has) {
        int position = order[i];
        earlier = a.by_writes(position);
        float sum = to_float(k_val[position]);
        for (--i; i >= begin; --i) {
          const int before = order[i];
          if (a.by_writes(before) != earlier) break;
          position = before;
          sum += to_float(k_val[position]);
        }
        value = weight * sum * expf(static_cast<float>(between));
        between += gate(earlier, position);
        has = i >= begin;
      }
      const bool on = earlier >= 0;
      unsigned left = __ballot_sync(kAll, on);
      const unsigned same = __match_any_sync(kAll, earlier);
      if (__all_sync(kAll, !on || same == 1u << lane)) {
        if (on) row[earlier] += value;
        left = 0;
      }
      while (left != 0) {  // token by token: several lanes have the same
        const int leader = __ffs(left) - 1, shared = __shfl_sync(kAll, earlier, leader);
        const float sum = warp_sum(earlier == shared ? value : 0.0f);
        if (lane == leader) row[shared] += sum;
        left &= ~__ballot_sync(kAll, earlier == shared);
      }
      __syncwarp();
    }
  };
  clear_row();
  int valid = 0;
  for (int w0 = 0; t < at.tokens && w0 < writes; w0 += 32) {
    const int w = w0 + lane, entry = t * writes + w;
    const bool inside = w < writes;
    const int id = inside ? a.k_idx[at.token * writes + entry] : -1;
    const bool ok = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots);
    const int index = ok ? a.write_marks()[at.stored_token * writes + entry] : 0;
    valid += __popc(__ballot_sync(kAll, ok));
    double since = 0, after = 0, own_gate = 0;
    float kappa = 0, weight = 0;
    int own = -1, begin = 0;
    bool first = false;
    if (ok) {
      weight = kappa = to_float(k_val[entry]);
      begin = starts[index];
      const int end = starts[index + 1];
      if (end - begin == 1) {
        since = gate(t, entry);
        a.decay[at.stored * a.write_slots + index] = expf(static_cast<float>(since));
      } else {
        weight = 0;
        int last = -1;
        for (int e = begin; e < end; ++e) {
          const int position = order[e], te = a.by_writes(position);
          if (te != last) {
            const double x = gate(te, position);
            if (te <= t) {
              since += x;
            } else {
              after += x;
            }
            if (te == t) {
              own = e;
              own_gate = x;
              first = position == entry;
            }
          }
          if (te == t && first) weight += to_float(k_val[position]);
          last = te;
        }
        if (own == begin && first) {
          a.decay[at.stored * a.write_slots + index] = expf(static_cast<float>(since + after));
        }
      }
    }
    if (inside) {
      a.k_eff[(at.stored_token + t) * writes + w] = ok ? kappa * expf(static_cast<float>(since)) : 0.0f;
      a.k_carry[(at.stored_token + t) * writes + w] = ok ? kappa * expf(static_cast<float>(after)) : 0.0f;
    }
    add_pairs(first, weight, own - 1, begin, own_gate);
  }
  if (t < at.tokens && lane == 0) a.written[at.stored_token + t] = valid;
  store_row(a.a);
  clear_row();
  const T* q_val = static_cast<const T*>(a.q_val) + at.token * reads;
  for (int r0 = 0; t < at.tokens && r0 < reads; r0 += 32) {
    const int r = r0 + lane, entry = t * reads + r;
    const bool inside = r < reads;
    const int id = inside ? a.q_idx[at.token * reads + entry] : -1;
    const bool ok = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots);
    const int index = ok ? a.read_marks()[at.stored_token * reads + entry] : -1;
    const float q = ok ? to_float(q_val[entry]) : 0.0f;
    double since = 0;
    int begin = 0, i = -1;
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
    const bool passed = index >= 0 && i >= begin;
    if (inside) {
      a.q_eff[(at.stored_token + t) * reads + r] = passed ? q * expf(static_cast<float>(since)) : q;
    }
    add_pairs(passed, q, i, begin, 0.0);
  }
  store_row(a.qk);
}

template <int kThreads>
cudaError_t launch_sort(Params a, const Shape& s, Launch where) {
  const size_t fixed = sizeof(Scratch<kThreads>);
  a.shared_entries = static_cast<int>((shared_limit() - fixed) / (2 * sizeof(uint16_t)));
  const auto fitting = [&](int64_t per_token) {
    return s.chunk * per_token <= a.shared_entries ? s.chunk * per_token : 0;
  };
  const size_t positions = static_cast<size_t>(std::max(fitting(s.writes), fitting(s.reads)));
  return launch(sort_kernel<kThreads>, dim3(s.streams * a.chunks), kThreads, fixed + 2 * sizeof(uint16_t) * positions,
                where, a);
}

}  // namespace

cudaError_t phase1(const Forward& f, int64_t count, Launch where) {
  const Shape& s = f.shape;
  const Chunks& c = f.chunks;
  int bits = 0;
  while (bits < 31 && (s.slots - 1) >> bits > 0) ++bits;
  Params a = {};
  a.k_idx = f.in.k_idx;
  a.q_idx = f.in.q_idx;
  a.k_val = f.in.k_val;
  a.q_val = f.in.q_val;
  a.g = static_cast<const float*>(f.in.g);
  a.a = static_cast<float*>(c.a);
  a.qk = static_cast<float*>(c.qk);
  a.k_eff = static_cast<float*>(c.k_eff);
  a.k_carry = static_cast<float*>(c.k_carry);
  a.q_eff = static_cast<float*>(c.q_eff);
  a.decay = static_cast<float*>(c.decay);
  a.slots = c.slots;
  a.starts = c.starts;
  a.order = c.order;
  a.read_slots = c.read_slots;
  a.read_starts = c.read_starts;
  a.read_order = c.read_order;
  a.written = c.writes;
  a.tokens = s.tokens;
  a.stored_tokens = s.stored_tokens;
  a.stored_chunks = s.stored_chunks;
  a.first_chunk = s.first_chunk;
  a.chunk = static_cast<int>(s.chunk);
  a.writes = static_cast<int>(s.writes);
  a.reads = static_cast<int>(s.reads);
  a.gates = static_cast<int>(s.gates);
  a.write_slots = static_cast<int>(s.write_slots);
  a.read_slots_most = static_cast<int>(s.read_slots);
  a.num_slots = static_cast<int>(s.slots);
  a.bits = bits;
  a.chunks = static_cast<int>(count);
  a.by_writes = Divider(s.writes);
  a.rows = s.streams * count * s.chunk;
  const int64_t entries = s.chunk * std::max(s.writes, s.reads);
  const cudaError_t error = entries <= 2048   ? launch_sort<256>(a, s, where)
                            : entries <= 8192 ? launch_sort<512>(a, s, where)
                                              : launch_sort<1024>(a, s, where);
  if (error != cudaSuccess) return error;
  return launch(f.dtype == DType::bf16 ? pairs_kernel<bf16> : pairs_kernel<float>, dim3(div_up(a.rows, kPairWarps)),
                kPairThreads, sizeof(float) * kPairWarps * s.chunk, Launch{where.stream}, a);
}

}  // namespace sdm::gpu
