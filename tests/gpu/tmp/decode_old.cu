// Decode: the recurrence for one token a stream (section 1 of the specification). A block takes a slice
// of the columns of one stream. Two dependent accesses to memory, ids then rows, and one sum over the rows:
// what the token retrieves and what it reads of the old bank come together, for with the write's delta
//     y = sum over reads of q * (old row, decayed where it is written) + (sum of q * weight) * delta.
// Few streams are bound by latency, many by the W + R rows read and the W rows written, and by instructions:
// then slices are wider, for every slice of a stream matches its ids anew.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMost = 256;  // entries of a token
constexpr int kBatch = 64;  // written rows, and read rows, that a block holds in registers
constexpr int64_t kEnoughBlocks = 512;

struct Params {
  void* bank;
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val, *v;
  const float *beta, *g;
  void* y;
  int64_t width, bank_stride;
  int slices, writes, reads, gates, streams_per_bank, num_slots;
};

// A row's slice: `kLanes` threads, each with kSteps pieces of V columns.
template <int V, int Lanes>
struct Slice {
  static constexpr int kLanes = Lanes;
  static constexpr int kSteps = V == 1 ? 2 : 1;
  static constexpr int kColumns = kLanes * kSteps * V;
  static constexpr int kTeams = kThreads / kLanes;
  static constexpr int kHeld = kBatch / kTeams;                                 // rows of each kind in a thread
  static constexpr int kBlocks = kHeld * kSteps <= 2 ? 4 : kHeld <= 4 ? 3 : 2;  // on a multiprocessor
  __device__ static int column(int lane, int step) { return (step * kLanes + lane) * V; }
};

// What a token does to a row that it writes, in one 16-byte load.
struct __align__(16) WrittenRow {
  float retrieve, read;  // times the old row: into what is retrieved, and into the reading
  float decay, weight;   // the new row: decay * row + weight * delta
};

template <class T, int V, int L>
__global__ void __launch_bounds__(kThreads, (Slice<V, L>::kBlocks)) decode_kernel(const __grid_constant__ Params a) {
  static_assert(kThreads == kMost, "a thread an entry");
  using S = Slice<V, L>;
  constexpr int kHeld = S::kHeld, kTeams = S::kTeams, kSteps = S::kSteps;
  __shared__ __align__(16) int32_t write_id[kMost], read_id[kMost];
  __shared__ float kappa[kMost], q[kMost];  // of single entries
  __shared__ int32_t moved_id[kMost];       // the slot at its first entry, else -1
  __shared__ WrittenRow factors[kMost];     // at the first entry of a slot, else zeros
  __shared__ float read_factor[kMost];      // weights of reads of slots that are not written, else 0
  __shared__ float shared_weight[kWarps];   // sums over slots of the weights of writes times those of reads
  __shared__ __align__(16) float sums[2][kWarps][S::kColumns], delta[S::kColumns];  // retrieved, read
  const int slice = blockIdx.x % a.slices;
  const int64_t p = blockIdx.x / a.slices;
  const int lane = threadIdx.x % L, team = threadIdx.x / L;
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  const int64_t column0 = static_cast<int64_t>(slice) * S::kColumns;
  const int columns = static_cast<int>(min(static_cast<int64_t>(S::kColumns), a.width - column0));
  T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column0;
  const auto id_or_none = [&](int id) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots) ? id : -1;
  };

  wait_for_previous();
  using Rows = Packed<T, V>[kHeld][kSteps];
  // Rows team + k * kTeams of a batch, from entry `base` on.
  const auto fetch = [&](Rows& rows, int base, auto id_of) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int id = id_of(k, base + team + k * kTeams);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int c = S::column(lane, s);
        rows[k][s] = {};
        if (id >= 0 && c < columns) rows[k][s] = load_row<T, V>(bank + id * a.width + c);
      }
    }
  };
  const auto moved = [&](int, int e) { return moved_id[e]; };
  // The rows set out as soon as each thread knows its own; those of repeated entries in vain.
  int write_ids[kHeld], read_ids[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int e = team + k * kTeams;
    write_ids[k] = e < a.writes ? id_or_none(a.k_idx[p * a.writes + e]) : -1;
    read_ids[k] = e < a.reads ? id_or_none(a.q_idx[p * a.reads + e]) : -1;
  }
  float v = 0, beta = 0;
  Rows written, old;
  {
    const int e = threadIdx.x;
    const bool writes = e < a.writes, reads = e < a.reads;
    const int w_id = writes ? a.k_idx[p * a.writes + e] : -1, r_id = reads ? a.q_idx[p * a.reads + e] : -1;
    const T none{};
    const T w_weight = writes ? static_cast<const T*>(a.k_val)[p * a.writes + e] : none;
    const T r_weight = reads ? static_cast<const T*>(a.q_val)[p * a.reads + e] : none;
    const float gate = writes ? a.g[p * a.gates + (a.gates == 1 ? 0 : e)] : 0.0f;
    if (e < columns) {
      v = to_float(static_cast<const T*>(a.v)[p * a.width + column0 + e]);
      beta = a.beta[p];
    }
    fetch(written, 0, [&](int k, int) { return write_ids[k]; });
    fetch(old, 0, [&](int k, int) { return read_ids[k]; });
    // For now as if no two entries named one slot.
    const int w = id_or_none(w_id), r = id_or_none(r_id);
    const float w_value = to_float(w_weight), r_value = to_float(r_weight), factor = expf(gate);
    write_id[e] = moved_id[e] = w;
    read_id[e] = r;
    kappa[e] = w_value;
    q[e] = r_value;
    factors[e] = w >= 0 ? WrittenRow{w_value * factor, 0.0f, factor, w_value} : WrittenRow{};
    read_factor[e] = r >= 0 ? r_value : 0.0f;
  }
  __syncthreads();
  // A warp takes some writes and looks for others of their slots, and for reads, which see them all.
  const int share = (a.writes + 8 * kWarps - 1) / (8 * kWarps) * 8;  // at most 32
  const int first = warp * share;
  unsigned equals = 0;  // of which of them
  for (int k = 0; k < share; k += 8) {
    const int4* mine = reinterpret_cast<const int4*>(write_id + first + k);
    const int4 low = mine[0], high = mine[1];
    int id[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) id[j] = id[j] < 0 ? -2 : id[j];  // no slot equals none
    const auto compare = [&](int other) {
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) bits |= other == id[j] ? 1u << j : 0u;
      return bits;
    };
    unsigned found = 0;
    for (int base = 0; base < a.writes; base += 64) {
#pragma unroll
      for (int i = base + in_warp; i < base + 64; i += 32) {
        const int self = i - (first + k);
        found |= compare(write_id[i]) & ~(static_cast<unsigned>(self) < 8 ? 1u << self : 0u);
      }
    }
    for (int base = 0; base < a.reads; base += 64) {
      found |= compare(read_id[base + in_warp]) | compare(read_id[base + 32 + in_warp]);
    }
    equals |= found << k;
  }
  equals = __reduce_or_sync(0xffffffffu, equals);
  // The first write of a slot takes the weights of the others, and of all reads.
  float through = 0;
  for (; equals != 0; equals &= equals - 1) {
    const int e = first + __ffs(static_cast<int>(equals)) - 1;
    const int id = write_id[e];
    float sum = 0, read_sum = 0;
    bool repeats = false;
    for (int i = in_warp; i < a.writes; i += 32) {
      if (write_id[i] != id) continue;
      sum += kappa[i];
      repeats |= i < e;
    }
    if (__any_sync(0xffffffffu, repeats)) {
      if (in_warp == 0) {
        moved_id[e] = -1;
        factors[e] = WrittenRow{};
      }
      continue;
    }
    for (int i = in_warp; i < a.reads; i += 32) {
      if (read_id[i] != id) continue;
      read_sum += q[i];
      read_factor[i] = 0;
    }
    sum = warp_sum(sum);
    read_sum = warp_sum(read_sum);
    if (in_warp == 0) {
      const float factor = factors[e].decay;
      factors[e] = WrittenRow{sum * factor, read_sum * factor, factor, sum};
    }
    through += sum * read_sum;
  }
  if (in_warp == 0) shared_weight[warp] = through;
  const bool any = __syncthreads_or(threadIdx.x < a.writes && write_id[threadIdx.x] >= 0);

  constexpr int kValues = kSteps * V;
  float sum[kValues] = {}, read_sum[kValues] = {};
  for (int base = 0; base < a.writes; base += kBatch) {
    if (base > 0) fetch(written, base, moved);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const WrittenRow row = factors[base + team + k * kTeams];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float x[V];
        unpack<T, V>(written[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          sum[s * V + j] += row.retrieve * x[j];
          read_sum[s * V + j] += row.read * x[j];
        }
      }
    }
  }
  for (int base = 0; base < a.reads; base += kBatch) {
    if (base > 0) fetch(old, base, [&](int, int e) { return read_id[e]; });
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const float factor = read_factor[base + team + k * kTeams];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        float x[V];
        unpack<T, V>(old[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) read_sum[s * V + j] += factor * x[j];
      }
    }
  }
  // The teams of a warp add their sums: the lower half of the lanes goes on with what is retrieved, the upper
  // with what is read, and of 4 teams each pair with half of the columns.
  if constexpr (L == 32) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int c = S::column(lane, i / V) + i % V;
      sums[0][warp][c] = sum[i];
      sums[1][warp][c] = read_sum[i];
    }
  } else {
    static_assert(kSteps == 1);
    const bool upper = in_warp >= 16;
    float kept[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[j] : read_sum[j], 16);
      kept[j] = (upper ? read_sum[j] : sum[j]) + other;
    }
    if constexpr (L == 16) {
#pragma unroll
      for (int j = 0; j < V; ++j) sums[upper][warp][S::column(lane, 0) + j] = kept[j];
    } else {
      static_assert(L == 8 && V == 8);
      const bool right = in_warp & 8;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float other = __shfl_xor_sync(0xffffffffu, right ? kept[j] : kept[j + 4], 8);
        sums[upper][warp][S::column(lane, 0) + 4 * right + j] = (right ? kept[j + 4] : kept[j]) + other;
      }
    }
  }
  // What the writes of the first batch need, while the others arrive.
  constexpr bool kKeep = kHeld <= 4;
  int ids[kHeld];
  WrittenRow rows[kHeld];
  const auto take = [&](int base) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      ids[k] = moved_id[base + team + k * kTeams];
      rows[k] = factors[base + team + k * kTeams];
    }
  };
  if (kKeep) take(0);
  __syncthreads();
  static_assert(S::kColumns <= kThreads);
  if (threadIdx.x < S::kColumns) {
    const int c = threadIdx.x;
    float total = 0, y = 0, shared = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      total += sums[0][k][c];
      y += sums[1][k][c];
      shared += shared_weight[k];
    }
    const float d = any && c < columns ? beta * (v - total) : 0.0f;
    delta[c] = d;
    if (any) y += shared * d;
    if (c < columns) from_float(static_cast<T*>(a.y) + p * a.width + column0 + c, y);
  }
  __syncthreads();
  for (int base = 0; base < a.writes; base += kBatch) {
    if (a.writes > kBatch) fetch(written, base, moved);
    if (!kKeep || base > 0) take(base);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (ids[k] < 0) continue;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int c = S::column(lane, s);
        float x[V];
        unpack<T, V>(written[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = rows[k].decay * x[j] + rows[k].weight * delta[c + j];
        if (c < columns) store_packed_streaming<T, V>(bank + ids[k] * a.width + c, pack<T, V>(x));
      }
    }
  }
}

// The widest slices of which there are enough to fill the GPU, and no wider than a row.
template <class T, int V, int L>
cudaError_t start(Params a, int64_t streams, Launch where) {
  using S = Slice<V, L>;
  a.slices = static_cast<int>(div_up(a.width, S::kColumns));
  if constexpr (V > 1 && S::kColumns > kSlice) {
    if (streams * a.slices < kEnoughBlocks || S::kColumns / 2 >= a.width) return start<T, V, L / 2>(a, streams, where);
  }
  return launch(decode_kernel<T, V, L>, dim3(streams * a.slices), kThreads, 0, where, a);
}

}  // namespace

cudaError_t decode(const Decode& d, Launch where) {
  const Shape& s = d.shape;
  const Params params{d.bank,
                      d.in.k_idx,
                      d.in.q_idx,
                      d.in.k_val,
                      d.in.q_val,
                      d.in.v,
                      static_cast<const float*>(d.in.beta),
                      static_cast<const float*>(d.in.g),
                      d.y,
                      s.width,
                      s.slots * s.width,
                      0,
                      static_cast<int>(s.writes),
                      static_cast<int>(s.reads),
                      static_cast<int>(s.gates),
                      static_cast<int>(s.streams_per_bank),
                      static_cast<int>(s.slots)};
  return for_rows(d.dtype, s.width, [&](auto type, auto v) {
    return start<decltype(type), decltype(v)::value, 32>(params, s.streams, where);
  });
}

}  // namespace sdm::gpu
