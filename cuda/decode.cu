// Decode: the recurrence for one token a stream (section 1 of the specification). A block takes a slice
// of the columns of one stream. Two dependent accesses to memory, ids then rows, and one sum over the rows:
// what the token retrieves and what it reads of the old bank come together, for with the write's delta
//     y = sum over reads of q * (old row, decayed where it is written) + (sum of q * weight) * delta.
// Few streams are bound by latency, many by the W + R rows read and the W rows written, and by instructions:
// every slice of a stream matches its ids anew and has pages of its own to find, so slices are as wide as leaves enough
// blocks.
//
// Launched to overlap, steps depend on each other through the bank alone: a step reads its tokens, matches their ids
// and brings its rows into the second-level cache while the steps before it run; then it waits and loads the rows. The
// bits are the same either way.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMost = 256;                 // entries of a token
constexpr int kBatch = 64;                 // written rows, and read rows, that a block holds in registers
constexpr int kParts = kThreads / kBatch;  // threads that look for a write's equals
constexpr unsigned kMostStreams = 32768;   // along one axis of a grid

struct Params {
  void* bank;
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val, *v;
  const float *beta, *g;
  void* y;
  int64_t streams, width, bank_stride;
  int writes, reads, gates, streams_per_bank, num_slots;
  bool overlap;  // with the steps before and after
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
  __shared__ __align__(16) float kappa[kMost], q[kMost];
  __shared__ float decay[kMost];
  __shared__ int32_t moved_id[kMost];      // the slot at its first entry, else -1
  __shared__ WrittenRow factors[kMost];    // at the first entry of a slot, else zeros
  __shared__ float read_factor[kMost];     // weights of reads of slots that are not written, else 0
  __shared__ float shared_weight[kWarps];  // sums over slots of the weights of writes times those of reads
  __shared__ __align__(16) float sums[2][kWarps][S::kColumns], delta[S::kColumns];  // retrieved, read
  const int64_t p = blockIdx.y + static_cast<int64_t>(gridDim.y) * blockIdx.z;
  if (p >= a.streams) return;
  const int lane = threadIdx.x % L, team = threadIdx.x / L;
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * S::kColumns;
  const int columns = static_cast<int>(min(static_cast<int64_t>(S::kColumns), a.width - column0));
  const auto id_or_none = [&](int id) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots) ? id : -1;
  };
  // The step after this one may read its own tokens; it waits for the bank, as this one does below.
  if (a.overlap) let_next_start();

  int write_ids[kHeld], read_ids[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int e = team + k * kTeams;
    write_ids[k] = e < a.writes ? id_or_none(a.k_idx[p * a.writes + e]) : -1;
    read_ids[k] = e < a.reads ? id_or_none(a.q_idx[p * a.reads + e]) : -1;
  }
  const int entry = threadIdx.x;
  const bool writes = entry < a.writes, reads = entry < a.reads;
  const int w_id = writes ? a.k_idx[p * a.writes + entry] : -1, r_id = reads ? a.q_idx[p * a.reads + entry] : -1;
  const T none{};
  const T w_weight = writes ? static_cast<const T*>(a.k_val)[p * a.writes + entry] : none;
  const T r_weight = reads ? static_cast<const T*>(a.q_val)[p * a.reads + entry] : none;
  const float gate = writes ? a.g[p * a.gates + (a.gates == 1 ? 0 : entry)] : 0.0f;
  float v = 0, beta = 0;
  if (entry < columns) {
    v = to_float(static_cast<const T*>(a.v)[p * a.width + column0 + entry]);
    beta = a.beta[p];
  }

  T* bank = static_cast<T*>(a.bank) + (a.streams_per_bank == 1 ? p : p / a.streams_per_bank) * a.bank_stride + column0;
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
  const auto read = [&](int, int e) { return read_id[e]; };
  Rows written, old;
  // The rows set out as soon as each thread knows its own, at least to the second-level cache; those of repeated
  // entries in vain.
  if (!a.overlap) {
    fetch(written, 0, [&](int k, int) { return write_ids[k]; });
    fetch(old, 0, [&](int k, int) { return read_ids[k]; });
  } else {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int c = S::column(lane, s);
        if (write_ids[k] >= 0 && c < columns) prefetch_row(bank + write_ids[k] * a.width + c);
        if (read_ids[k] >= 0 && c < columns) prefetch_row(bank + read_ids[k] * a.width + c);
      }
    }
  }
  const int r = id_or_none(r_id);
  write_id[entry] = moved_id[entry] = id_or_none(w_id);
  read_id[entry] = r;
  kappa[entry] = to_float(w_weight);
  q[entry] = read_factor[entry] = r >= 0 ? to_float(r_weight) : 0.0f;
  decay[entry] = expf(gate);
  __syncthreads();

  // kParts threads look for all entries of a write's slot, each at its share of the others. The slot's first write
  // takes the weights of them all: of the other writes, and of the reads, which see every write.
  const int part = in_warp % kParts;
  float through = 0;
  for (int base = 0; base < a.writes; base += kBatch) {
    const int e = base + static_cast<int>(threadIdx.x) / kParts;
    const int id = write_id[e] < 0 ? -2 : write_id[e];  // no slot equals none
    // Which of this thread's share of a batch of entries name the slot, a bit each; adds their weights.
    const auto look = [&](const int32_t* ids, const float* weights, float& sum) {
      unsigned found = 0;
#pragma unroll
      for (int i = 0; i < kBatch / (4 * kParts); ++i) {
        const int at = 4 * (kParts * i + part);
        const int4 other = *reinterpret_cast<const int4*>(ids + at);
        const float4 weight = *reinterpret_cast<const float4*>(weights + at);
        const auto compare = [&](int j, int other_id, float other_weight) {
          if (other_id != id) return;
          sum += other_weight;
          found |= 1u << (4 * i + j);
        };
        compare(0, other.x, weight.x);
        compare(1, other.y, weight.y);
        compare(2, other.z, weight.z);
        compare(3, other.w, weight.w);
      }
      return found;
    };
    // Of the lowest bit, within the batch.
    const auto position = [&](unsigned found) {
      const int bit = __ffs(static_cast<int>(found)) - 1;
      return 4 * (kParts * (bit / 4) + part) + bit % 4;
    };
    float sum = 0, read_sum = 0;
    bool repeats = false;
    for (int other = 0; other < a.writes; other += kBatch) {
      const unsigned found = look(write_id + other, kappa + other, sum);
      repeats |= found != 0 && other + position(found) < e;
    }
    const unsigned repeating = __ballot_sync(0xffffffffu, repeats) & team_mask<kParts>();
    const bool first = id >= 0 && repeating == 0;
    for (int other = 0; first && other < a.reads; other += kBatch) {
      for (unsigned found = look(read_id + other, q + other, read_sum); found != 0; found &= found - 1) {
        read_factor[other + position(found)] = 0;
      }
    }
#pragma unroll
    for (int offset = 1; offset < kParts; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      read_sum += __shfl_xor_sync(0xffffffffu, read_sum, offset);
    }
    if (part == 0) {
      const float factor = decay[e];
      if (!first) moved_id[e] = -1;
      factors[e] = first ? WrittenRow{sum * factor, read_sum * factor, factor, sum} : WrittenRow{};
      through += first ? sum * read_sum : 0.0f;
    }
  }
  through = warp_sum(through);
  if (in_warp == 0) shared_weight[warp] = through;
  const bool any = __syncthreads_or(write_id[threadIdx.x] >= 0);
  if (a.overlap) {
    wait_for_previous();
    fetch(written, 0, [&](int, int e) { return write_id[e]; });
    fetch(old, 0, read);
  }

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
    if (base > 0) fetch(old, base, read);
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
  // Over the warps: what is retrieved, which the writes wait for; what is read by other threads, where there are some.
  const auto total = [&](int kind, int c) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += sums[kind][k][c];
    return sum;
  };
  static_assert(S::kColumns <= kThreads);
  if (threadIdx.x < S::kColumns) {
    const int c = threadIdx.x;
    delta[c] = any && c < columns ? beta * (v - total(0, c)) : 0.0f;
  }
  constexpr int kFirstReader = 2 * S::kColumns <= kThreads ? S::kColumns : 0;
  const int reader = static_cast<int>(threadIdx.x) - kFirstReader;
  const bool reads_out = reader >= 0 && reader < columns;
  float y = 0, shared = 0;
  if (reads_out) {
    y = total(1, reader);
#pragma unroll
    for (int k = 0; k < kWarps; ++k) shared += shared_weight[k];
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
  if (reads_out) {
    if (any) y += shared * delta[reader];
    from_float(static_cast<T*>(a.y) + p * a.width + column0 + reader, y);
  }
}

// The widest slices that leave enough blocks, and no wider than a row.
template <class T, int V, int L>
cudaError_t start(const Params& a, Launch where) {
  using S = Slice<V, L>;
  const int64_t slices = div_up(a.width, S::kColumns);
  if constexpr (V > 1 && S::kColumns > 64) {
    constexpr int64_t enough = L == 32 ? 256 : 64;
    if (a.streams * slices < enough || S::kColumns / 2 >= a.width) return start<T, V, L / 2>(a, where);
  }
  const unsigned side = static_cast<unsigned>(std::min<int64_t>(a.streams, kMostStreams));
  const dim3 grid(static_cast<unsigned>(slices), side, side == 0 ? 0 : static_cast<unsigned>(div_up(a.streams, side)));
  return launch(decode_kernel<T, V, L>, grid, kThreads, 0, where, a);
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
                      s.streams,
                      s.width,
                      s.slots * s.width,
                      static_cast<int>(s.writes),
                      static_cast<int>(s.reads),
                      static_cast<int>(s.gates),
                      static_cast<int>(s.streams_per_bank),
                      static_cast<int>(s.slots),
                      where.overlap};
  return for_rows(d.dtype, s.width,
                  [&](auto type, auto v) { return start<decltype(type), decltype(v)::value, 32>(params, where); });
}

}  // namespace sdm::gpu
