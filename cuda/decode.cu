// Decode: the recurrence for one token a stream (section 1 of the specification). A block takes a slice
// of the columns of one stream. Two dependent accesses to memory, ids then rows, and one sum over the rows:
// what the token retrieves and what it reads of the old bank come together, for with the write's delta
//     y = sum over reads of q * (old row, decayed where it is written) + (sum of q * weight) * delta.
// Few streams are bound by latency, many by the W + R rows read and the W rows written, and by instructions:
// then slices are wider, for every slice of a stream matches its ids anew.
#include <cstdio>
#include <cstdlib>
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

#ifndef BLOCKS16
#define BLOCKS16 3
#endif
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
  int overlap, order, ahead, streaming, lanes, cluster;
};

// A row's slice: `kLanes` threads, each with kSteps pieces of V columns.
template <int V, int Lanes>
struct Slice {
  static constexpr int kLanes = Lanes;
  static constexpr int kSteps = V == 1 ? 2 : 1;
  static constexpr int kColumns = kLanes * kSteps * V;
  static constexpr int kTeams = kThreads / kLanes;
  static constexpr int kHeld = kBatch / kTeams;                                 // rows of each kind in a thread
  static constexpr int kBlocks = kHeld * kSteps <= 2 ? 4 : kHeld <= 4 ? BLOCKS16 : 2;  // on a multiprocessor
  __device__ static int column(int lane, int step) { return (step * kLanes + lane) * V; }
};

// What a token does to a row that it writes, in one 16-byte load.
struct __align__(16) WrittenRow {
  float retrieve, read;  // times the old row: into what is retrieved, and into the reading
  float decay, weight;   // the new row: decay * row + weight * delta
};

#ifndef BLOCKS16
#define BLOCKS16 3
#endif
#ifndef STAGE
#define STAGE 9
#endif
#ifdef STAMPS
__device__ long long stamps[1024 * 8];
#define STAMP(i)                                                                    \
  do {                                                                              \
    long long now;                                                                  \
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");                    \
    if (threadIdx.x == 0) stamps[(blockIdx.x + gridDim.x * blockIdx.y) * 8 + i] = now; \
  } while (0)
#else
#define STAMP(i)
#endif

template <class T, int V, int L>
__global__ void __launch_bounds__(kThreads, (Slice<V, L>::kBlocks)) decode_kernel(const __grid_constant__ Params a) {
  static_assert(kThreads == kMost, "a thread an entry");
  static_assert(kThreads == 4 * kBatch, "four threads a write");
  using S = Slice<V, L>;
  constexpr int kHeld = S::kHeld, kTeams = S::kTeams, kSteps = S::kSteps;
  __shared__ __align__(16) int32_t write_id[kMost], read_id[kMost];
  __shared__ __align__(16) float kappa[kMost], q[kMost];
  __shared__ float decay[kMost];
  __shared__ int32_t moved_id[kMost];    // the slot at its first entry, else -1
  __shared__ WrittenRow factors[kMost];  // at the first entry of a slot, else zeros
  __shared__ float read_factor[kMost];   // weights of reads of slots that are not written, else 0
  __shared__ float shared_weight[kWarps];  // sums over slots of the weights of writes times those of reads
  __shared__ __align__(16) float sums[2][kWarps][S::kColumns], delta[S::kColumns];  // retrieved, read
#ifdef TWICE
  for (int pass = 0; pass < 2; ++pass) {
  __syncthreads();
#endif
  STAMP(0);
  const int64_t p = a.order ? blockIdx.y : blockIdx.x;
  const int64_t slice = a.order ? blockIdx.x : blockIdx.y;
  const int lane = threadIdx.x % L, team = threadIdx.x / L;
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32;
  const int64_t column0 = slice * S::kColumns;
  const int columns = static_cast<int>(min(static_cast<int64_t>(S::kColumns), a.width - column0));
  const auto id_or_none = [&](int id) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots) ? id : -1;
  };
  if (a.overlap) let_next_start();
  if (STAGE == 0) {
    wait_for_previous();
    return;
  }

  using Rows = Packed<T, V>[kHeld][kSteps];
  int write_ids[kHeld], read_ids[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int e = team + k * kTeams;
    write_ids[k] = e < a.writes ? a.k_idx[p * a.writes + e] : -1;
    read_ids[k] = e < a.reads ? a.q_idx[p * a.reads + e] : -1;
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
  const int64_t in_bank = a.streams_per_bank == 1 ? p : p / a.streams_per_bank;
  T* bank = static_cast<T*>(a.bank) + in_bank * a.bank_stride + column0;
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
  STAMP(1);
  // The rows set out as soon as each thread knows its own; those of repeated entries in vain.
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    write_ids[k] = id_or_none(write_ids[k]);
    read_ids[k] = id_or_none(read_ids[k]);
  }
  Rows written, old;
  const auto fetch_first = [&] {
    fetch(written, 0, [&](int k, int) { return write_ids[k]; });
    fetch(old, 0, [&](int k, int) { return read_ids[k]; });
  };
  if (!a.overlap) {
    if (STAGE > 1) fetch_first();
  } else if (a.ahead) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int c = S::column(lane, s);
        if (write_ids[k] >= 0 && c < columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(bank + write_ids[k] * a.width + c));
        if (read_ids[k] >= 0 && c < columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(bank + read_ids[k] * a.width + c));
      }
    }
  }
  STAMP(2);
  // For now as if no two entries named one slot.
  write_id[entry] = moved_id[entry] = id_or_none(w_id);
  read_id[entry] = id_or_none(r_id);
  kappa[entry] = to_float(w_weight);
  q[entry] = read_factor[entry] = id_or_none(r_id) >= 0 ? to_float(r_weight) : 0.0f;
  decay[entry] = expf(gate);
  __syncthreads();
  STAMP(3);
  if (STAGE == 1) {
    wait_for_previous();
    if (decay[threadIdx.x] < 0) from_float(static_cast<T*>(a.y), kappa[entry ^ 1] + q[entry ^ 1] + v + beta + write_ids[0] + read_ids[0]);
    return;
  }
  // Four threads look for all entries of a write's slot, each at a quarter of the others. Its first write takes the
  // weights of the others, and of all reads, which see them all.
  const int part = in_warp % 4;
  float through = 0;
  for (int base = 0; base < a.writes; base += kBatch) {
    const int e = base + static_cast<int>(threadIdx.x) / 4;
    const int id = write_id[e] < 0 ? -2 : write_id[e];  // no slot equals none
    // Of a batch of entries: which of four in each of four places name the slot; adds their weights.
    const auto look = [&](const int32_t* ids, const float* weights, float& sum) {
      unsigned found = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int4 other = *reinterpret_cast<const int4*>(ids + 16 * i + 4 * part);
        const float4 weight = *reinterpret_cast<const float4*>(weights + 16 * i + 4 * part);
        const auto take = [&](int j, int x, float w) {
          if (x == id) {
            sum += w;
            found |= 1u << (4 * i + j);
          }
        };
        take(0, other.x, weight.x);
        take(1, other.y, weight.y);
        take(2, other.z, weight.z);
        take(3, other.w, weight.w);
      }
      return found;
    };
    const auto position = [&](unsigned found) {
      const int bit = __ffs(static_cast<int>(found)) - 1;
      return bit / 4 * 16 + 4 * part + bit % 4;
    };
    float sum = 0, read_sum = 0;
    bool repeats = false;
    for (int other = 0; other < a.writes; other += kBatch) {
      const unsigned found = look(write_id + other, kappa + other, sum);
      repeats |= found != 0 && other + position(found) < e;
    }
    for (int other = 0; other < a.reads; other += kBatch) {
      for (unsigned found = look(read_id + other, q + other, read_sum); found != 0; found &= found - 1) {
        read_factor[other + position(found)] = 0;
      }
    }
    const float factor = decay[e];
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      read_sum += __shfl_xor_sync(0xffffffffu, read_sum, offset);
    }
    const unsigned repeating = __ballot_sync(0xffffffffu, repeats) >> (in_warp - part) & 15;
    if (part == 0) {
      const bool first = id >= 0 && repeating == 0;
      if (!first) moved_id[e] = -1;
      factors[e] = first ? WrittenRow{sum * factor, read_sum * factor, factor, sum} : WrittenRow{};
      through += first ? sum * read_sum : 0.0f;
    }
  }
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) through += __shfl_xor_sync(0xffffffffu, through, offset);
  if (in_warp == 0) shared_weight[warp] = through;
  const bool any = __syncthreads_or(write_id[threadIdx.x] >= 0);
  if (a.overlap) {
    wait_for_previous();
    fetch_first();
  }
  STAMP(4);
  if (STAGE == 2) {
    if (factors[threadIdx.x / 4].decay < -100) from_float(static_cast<T*>(a.y), read_factor[threadIdx.x / 4] + v + beta + any);
    return;
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
  STAMP(5);
  if (STAGE == 3) {
    if (sums[0][0][threadIdx.x % S::kColumns] == 12345.0f) from_float(static_cast<T*>(a.y), rows[0].decay + v + beta + any);
    return;
  }
  // The sums over the warps: what is retrieved first, for it holds up the writes; what is read by other threads.
  const auto total = [&](int kind, int c) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += sums[kind][k][c];
    return sum;
  };
  constexpr int kReaders = 2 * S::kColumns <= kThreads ? S::kColumns : 0;  // the first of the threads that sum reads
  static_assert(S::kColumns <= kThreads);
  if (threadIdx.x < S::kColumns) {
    const int c = threadIdx.x;
    delta[c] = any && c < columns ? beta * (v - total(0, c)) : 0.0f;
  }
  const int reader = static_cast<int>(threadIdx.x) - kReaders;
  const bool reads_out = reader >= 0 && reader < columns;
  float y = 0;
  if (reads_out) {
    y = total(1, reader);
    float shared = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) shared += shared_weight[k];
    v = shared;
  }
  __syncthreads();
  STAMP(6);
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
        if (c < columns) {
          if (a.streaming)
            store_packed_streaming<T, V>(bank + ids[k] * a.width + c, pack<T, V>(x));
          else
            store_packed<T, V>(bank + ids[k] * a.width + c, pack<T, V>(x));
        }
      }
    }
  }
  if (reads_out) {
    if (any) y += v * delta[reader];
    from_float(static_cast<T*>(a.y) + p * a.width + column0 + reader, y);
  }
  STAMP(7);
#ifdef TWICE
  }
#endif
}


// Prototype: a cluster a stream and 1024 columns; a block some rows.
template <class T>
struct Quad {
  uint32_t word[sizeof(T) == 2 ? 2 : 4];
};
template <class T>
__device__ inline Quad<T> load_quad(const T* p) {
  Quad<T> x;
  if constexpr (sizeof(T) == 2) {
    const uint2 q = __ldcg(reinterpret_cast<const uint2*>(p));
    x.word[0] = q.x, x.word[1] = q.y;
  } else {
    const uint4 q = __ldcg(reinterpret_cast<const uint4*>(p));
    x.word[0] = q.x, x.word[1] = q.y, x.word[2] = q.z, x.word[3] = q.w;
  }
  return x;
}
template <class T>
__device__ inline void store_quad(T* p, const float (&y)[4]) {
  if constexpr (sizeof(T) == 2) {
    const __nv_bfloat162 a = __floats2bfloat162_rn(y[0], y[1]), b = __floats2bfloat162_rn(y[2], y[3]);
    __stcs(reinterpret_cast<uint2*>(p), make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b)));
  } else {
    __stcs(reinterpret_cast<float4*>(p), make_float4(y[0], y[1], y[2], y[3]));
  }
}
template <class T>
__device__ inline void unpack_quad(const Quad<T>& x, float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      y[i] = __uint_as_float(x.word[i]);
    } else {
      const uint32_t w = x.word[i / 2];
      y[i] = __uint_as_float(i % 2 == 0 ? w << 16 : w & 0xffff0000u);
    }
  }
}
__device__ inline uint32_t remote(const void* p, int rank) {
  uint32_t to;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(rank));
  return to;
}
__device__ inline void store_remote(uint32_t to, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
__device__ inline void store_remote(uint32_t to, const float (&x)[4]) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

template <class T, int Blocks>
__global__ void __launch_bounds__(kThreads, Blocks >= 8 ? 3 : 2) rows_kernel(const __grid_constant__ Params a) {
  constexpr int kRows = 64 / Blocks, kColumns = 1024, kOwn = kColumns / Blocks;
  __shared__ __align__(16) int32_t ids[2][64];
  __shared__ __align__(16) float weights[2][64];
  __shared__ WrittenRow factors[kRows];
  __shared__ int32_t moved_id[kRows];
  __shared__ __align__(16) float read_factor[kRows], through[kRows], throughs[Blocks];
  __shared__ __align__(16) float partial[2][Blocks][kOwn], delta[kColumns];
  STAMP(0);
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
  const int rank = blockIdx.x % Blocks;
  const int64_t p = blockIdx.y;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x / Blocks) * kColumns;
  const int t = threadIdx.x, warp = t / 32, in_warp = t % 32;
  if (a.overlap) let_next_start();
  if (STAGE == 0) {
    wait_for_previous();
    asm volatile("barrier.cluster.wait.acquire.aligned;");
    return;
  }
  const int i = t % 64;
  const bool is_write = t % 128 < 64, is_id = t < 128, inside = i < (is_write ? a.writes : a.reads);
  int id = -1;
  float weight = 0;
  if (inside) {
    if (is_id) id = is_write ? a.k_idx[p * a.writes + i] : a.q_idx[p * a.reads + i];
    else weight = to_float(is_write ? static_cast<const T*>(a.k_val)[p * a.writes + i] : static_cast<const T*>(a.q_val)[p * a.reads + i]);
  }
  float gate = 0, v = 0, beta = 0;
  const int mine = rank * kRows + t;
  if (t < kRows && mine < a.writes) gate = a.g[p * a.gates + (a.gates == 1 ? 0 : mine)];
  if (t < kOwn) {
    v = to_float(static_cast<const T*>(a.v)[p * a.width + column0 + rank * kOwn + t]);
    beta = a.beta[p];
  }
  const int64_t in_bank = a.streams_per_bank == 1 ? p : p / a.streams_per_bank;
  T* bank = static_cast<T*>(a.bank) + in_bank * a.bank_stride + column0 + 4 * t;
  if (is_id) ids[!is_write][i] = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots) ? id : -1;
  else weights[!is_write][i] = weight;
  STAMP(1);
  __syncthreads();
  STAMP(2);
  Quad<T> written[kRows], old[kRows];
  const int width = static_cast<int>(a.width);
  const auto fetch = [&] {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int w = ids[0][rank * kRows + k], r = ids[1][rank * kRows + k];
      written[k] = {}, old[k] = {};
      if (w >= 0) written[k] = load_quad(bank + static_cast<int64_t>(w) * width);
      if (r >= 0) old[k] = load_quad(bank + static_cast<int64_t>(r) * width);
    }
  };
  if (!a.overlap) {
    fetch();
  } else if (a.ahead) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int w = ids[0][rank * kRows + k], r = ids[1][rank * kRows + k];
      if (w >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(bank + static_cast<int64_t>(w) * width));
      if (r >= 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(bank + static_cast<int64_t>(r) * width));
    }
  }
  STAMP(3);
  for (int k = warp; k < 2 * kRows; k += kWarps) {
    const bool read = k >= kRows;
    const int n = k % kRows, e = rank * kRows + n;
    const int own = ids[read][e];
    const unsigned low = __ballot_sync(~0u, ids[0][in_warp] == own), high = __ballot_sync(~0u, ids[0][32 + in_warp] == own);
    if (read) {
      if (in_warp == 0) read_factor[n] = own >= 0 && (low | high) == 0 ? weights[1][e] : 0.0f;
      continue;
    }
    const bool in_low = ids[1][in_warp] == own, in_high = ids[1][32 + in_warp] == own;
    float sum = weights[0][e], read_sum = 0;
    if (own >= 0 && (__popc(low) + __popc(high) > 1 || __any_sync(~0u, in_low | in_high))) {
      sum = (low >> in_warp & 1 ? weights[0][in_warp] : 0.0f) + (high >> in_warp & 1 ? weights[0][32 + in_warp] : 0.0f);
      read_sum = (in_low ? weights[1][in_warp] : 0.0f) + (in_high ? weights[1][32 + in_warp] : 0.0f);
      sum = warp_sum(sum);
      read_sum = warp_sum(read_sum);
    }
    if (in_warp == 0) {
      const bool first = own >= 0 && e == (low != 0 ? __ffs(low) - 1 : 31 + __ffs(high));
      moved_id[n] = first ? own : -1;
      factors[n] = first ? WrittenRow{sum, read_sum, 0.0f, sum} : WrittenRow{};
      through[n] = first ? sum * read_sum : 0.0f;
    }
  }
  __shared__ float decays[kRows];
  if (t < kRows) decays[t] = expf(gate);
  const bool any = __syncthreads_or(is_id && is_write && ids[0][i] >= 0);
  if (a.overlap) {
    wait_for_previous();
    fetch();
  }
  STAMP(4);
  float sums[4] = {}, read_sums[4] = {};
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const WrittenRow row = factors[k];
    const float decay = moved_id[k] >= 0 ? decays[k] : 0.0f, factor = read_factor[k];
    float x[4], y[4];
    unpack_quad<T>(written[k], x);
    unpack_quad<T>(old[k], y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[j] += row.retrieve * decay * x[j];
      read_sums[j] += row.read * decay * x[j];
      read_sums[j] += factor * y[j];
    }
  }
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  {
    const int owner = 4 * t / kOwn, c = 4 * t % kOwn;
    store_remote(remote(&partial[0][rank][c], owner), sums);
    store_remote(remote(&partial[1][rank][c], owner), read_sums);
    if (t < Blocks) {
      float sum = 0;
      for (int k = 0; k < kRows; ++k) sum += through[k];
      store_remote(remote(&throughs[rank], t), sum);
    }
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  STAMP(5);
  if (STAGE == 3) {
    if (partial[0][0][t % kOwn] == 12345.0f) from_float(static_cast<T*>(a.y), v + beta + any + partial[1][0][t % kOwn]);
    return;
  }
  const auto total = [&](int kind, int c) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < Blocks; ++k) sum += partial[kind][k][c];
    return sum;
  };
  if (t < kOwn) {
    const float d = any ? beta * (v - total(0, t)) : 0.0f;
#pragma unroll
    for (int b = 0; b < Blocks; ++b) store_remote(remote(&delta[rank * kOwn + t], b), d);
  }
  constexpr int kReaders = 2 * kOwn <= kThreads ? kOwn : 0;
  const int reader = t - kReaders;
  const bool reads_out = reader >= 0 && reader < kOwn;
  float y = 0, shared = 0;
  if (reads_out) {
    y = total(1, reader);
#pragma unroll
    for (int k = 0; k < Blocks; ++k) shared += throughs[k];
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  STAMP(6);
  const float4 d = *reinterpret_cast<const float4*>(delta + 4 * t);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int to = moved_id[k];
    if (to < 0) continue;
    float x[4];
    unpack_quad<T>(written[k], x);
    const float decay = decays[k], w = factors[k].weight;
    x[0] = decay * x[0] + w * d.x;
    x[1] = decay * x[1] + w * d.y;
    x[2] = decay * x[2] + w * d.z;
    x[3] = decay * x[3] + w * d.w;
    store_quad<T>(bank + static_cast<int64_t>(to) * width, x);
  }
  if (reads_out) {
    if (any) y += shared * delta[rank * kOwn + reader];
    from_float(static_cast<T*>(a.y) + p * a.width + column0 + rank * kOwn + reader, y);
  }
  STAMP(7);
}

template <class T, int Blocks>
cudaError_t start_rows(const Params& a, int64_t streams, Launch where) {
  if (Blocks > 8) {
    const cudaError_t e = cudaFuncSetAttribute(reinterpret_cast<const void*>(rows_kernel<T, Blocks>), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (e != cudaSuccess) return e;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(a.width / 1024 * Blocks, streams);
  config.blockDim = kThreads;
  config.stream = where.stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = Blocks;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = where.overlap ? 2 : 1;
  return cudaLaunchKernelEx(&config, rows_kernel<T, Blocks>, a);
}

// The widest slices of which there are enough to fill the GPU, and no wider than a row.
template <class T, int V, int L>
cudaError_t start(Params a, int64_t streams, Launch where) {
  using S = Slice<V, L>;
  a.slices = static_cast<int>(div_up(a.width, S::kColumns));
  if constexpr (V > 1 && S::kColumns > kSlice) {
    const bool narrower = a.lanes ? a.lanes < L : streams * a.slices < kEnoughBlocks;
    if (narrower || S::kColumns / 2 >= a.width) return start<T, V, L / 2>(a, streams, where);
  }
  dim3 grid(streams, a.slices);
  if (a.order) grid = dim3(a.slices, streams);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.stream = where.stream;
  cudaLaunchAttribute attributes[2] = {};
  int n = 0;
  if (where.overlap) {
    attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[n++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (a.cluster > 1) {
    attributes[n].id = cudaLaunchAttributeClusterDimension;
    attributes[n].val.clusterDim.x = a.order ? a.cluster : 1;
    attributes[n].val.clusterDim.y = a.order ? 1 : a.cluster;
    attributes[n++].val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  config.numAttrs = n;
  return cudaLaunchKernelEx(&config, decode_kernel<T, V, L>, a);
}

#ifdef STAMPS
}
void print_stamps(int blocks) {
  static long long host[1024 * 8];
  cudaMemcpyFromSymbol(host, stamps, sizeof(host));
  std::printf("   cycles from start (mean, max over blocks):");
  for (int i = 1; i < 8; ++i) {
    double sum = 0, most = 0;
    for (int b = 0; b < blocks; ++b) {
      const double d = host[b * 8 + i] - host[b * 8];
      sum += d / blocks;
      most = d > most ? d : most;
    }
    std::printf("  [%d] %.0f %.0f", i, sum, most);
  }
  std::printf("\n");
}
namespace {
#endif
}  // namespace

cudaError_t decode(const Decode& d, Launch where) {
  const Shape& s = d.shape;
  const auto env = [](const char* name, int otherwise) {
    const char* x = std::getenv(name);
    return x ? std::atoi(x) : otherwise;
  };
  Params params{d.bank,
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
  params.overlap = where.overlap;
  params.order = env("ORDER", 1);
  params.ahead = env("AHEAD", 1);
  params.streaming = env("STREAMING", 1);
  params.lanes = env("LANES", 0);
  params.cluster = env("CLUSTER", 1);
  const int rows = env("ROWS", 0);
  if (rows && s.width % 1024 == 0 && s.writes <= 64 && s.reads <= 64 && s.streams < 65536) {
    if (d.dtype == DType::bf16) {
      if (rows == 4) return start_rows<bf16, 4>(params, s.streams, where);
      if (rows == 8) return start_rows<bf16, 8>(params, s.streams, where);
      return start_rows<bf16, 16>(params, s.streams, where);
    }
    if (rows == 4) return start_rows<float, 4>(params, s.streams, where);
    if (rows == 8) return start_rows<float, 8>(params, s.streams, where);
    return start_rows<float, 16>(params, s.streams, where);
  }
  return for_rows(d.dtype, s.width, [&](auto type, auto v) {
    return start<decltype(type), decltype(v)::value, 32>(params, s.streams, where);
  });
}

}  // namespace sdm::gpu
