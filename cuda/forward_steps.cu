// All steps of the forward in one kernel: gather, dual matmul and mover of a chunk after another (sections 3
// and 5 of the specification). Columns never meet, so a cluster of blocks takes the 128 bytes of a slice of one
// stream's rows through the chunks, eight tokens a block, a warp a token. The rows that the token writes wait in
// shared memory from the gather to the mover; the blocks hand each other u, and the delta of slots that tokens of
// several blocks write. Moves each row that is read, and each that is written in and out, once; bound by memory.
//
// A cluster takes work in pieces of some chunks of one slice, in the order of a counter: as many clusters as the
// device holds then share slices evenly. A piece waits for the one before it of its slice, which an earlier number
// took, so it is running or done.
#include <cooperative_groups.h>

#include <utility>

#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/common/tensor.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kTokens = 8;  // of a block, a warp each
constexpr int kThreads = 32 * kTokens;
constexpr int kLanes = 8;            // that share a row's slice
constexpr int kTeams = 32 / kLanes;  // rows a warp takes at once
constexpr int kMostTokens = 64;      // of a chunk: eight blocks
constexpr int kMostEntries = 64;     // of a token and kind, a multiple of 32
constexpr int kInFlight = 8;
constexpr int kPieceChunks = 4;
constexpr int kSquareStride = kMostTokens + 4;

enum class Save { nothing, row, bf16 };

struct Params {
  void* bank;
  const int32_t *k_idx, *q_idx, *written;
  const float *k_eff, *q_eff, *k_carry, *beta, *x, *qx;
  const int4* records;
  const void* v;
  void* y;
  float *error, *delta;  // or null
  void* snapshot;
  unsigned* taken;     // pieces taken
  unsigned* progress;  // [tasks] pieces done
  int64_t width, tokens, stored_tokens, stored_chunks, bank_stride, row_stride, row_offset;
  int64_t first_chunk, first, last;  // stored chunks begin at first_chunk; steps first .. last
  int chunk, writes, reads, write_slots, slices, tasks, pieces, streams_per_bank, num_slots;
  Divider by_writes;
};

// A warp's entries of one chunk.
struct Entries {
  int4 records[kMostEntries];
  int32_t write_slot[kMostEntries], read_slot[kMostEntries];
  float write_weight[kMostEntries], read_weight[kMostEntries];
};

template <int kColumns>
struct Memory {
  static constexpr int kRowStride = kColumns + 8;
  float u[kMostTokens * kRowStride];
  float squares[2][kTokens * kSquareStride];   // rows of X and QX
  float products[2][kTokens * kSquareStride];  // delta and QX u of the block's tokens
  Entries entries[kTokens];
  unsigned piece;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
namespace cg = cooperative_groups;

// Brings up to `bytes` at a 16-byte boundary into the second-level cache, without waiting.
__device__ inline void prefetch(const void* from, int64_t bytes) {
  if (bytes < 16 || reinterpret_cast<uintptr_t>(from) % 16 != 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(static_cast<uint32_t>(bytes) & ~15u)
               : "memory");
}

// Four bytes from global to shared memory without waiting.
__device__ inline void copy_word(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

template <class T, int V, Save S>
__device__ void steps(const Params& a) {
  constexpr int kColumns = kLanes * V;
  using Shared = Memory<kColumns>;
  extern __shared__ __align__(16) unsigned char shared[];
  Shared& memory = *reinterpret_cast<Shared*>(shared);
  uint4* held = reinterpret_cast<uint4*>(shared + sizeof(Shared));  // [8 tokens][W][8 lanes]
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), blocks = static_cast<int>(cluster.num_blocks());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = lane / kLanes, sub = lane % kLanes;
  const int t = rank * kTokens + warp;  // of the chunk
  Entries& entries = memory.entries[warp];
  uint4* mine = held + warp * a.writes * kLanes + sub;
  const auto row_of_entry = [&](int e) { return reinterpret_cast<const Packed<T, V>*>(mine + e * kLanes); };

  while (true) {
    if (rank == 0 && threadIdx.x < static_cast<unsigned>(blocks)) {
      unsigned piece = 0;
      if (threadIdx.x == 0) piece = atomicAdd(a.taken, 1u);
      piece = __shfl_sync((1u << blocks) - 1, piece, 0);
      *cluster.map_shared_rank(&memory.piece, threadIdx.x) = piece;
    }
    cluster.sync();
    const unsigned piece = memory.piece;
    if (piece >= static_cast<unsigned>(a.pieces)) break;
    const int task = static_cast<int>(piece) % a.tasks, part = static_cast<int>(piece) / a.tasks;
    if (part > 0) {
      if (threadIdx.x == 0) {
        unsigned done = 0;
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(a.progress + task) : "memory");
        } while (done < static_cast<unsigned>(part));
      }
      __syncthreads();
    }
    const int64_t p = task / a.slices;
    const int64_t column = static_cast<int64_t>(task % a.slices) * kColumns + sub * V;
    const bool inside = column < a.width;
    T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column;
    const int64_t begin = a.first + static_cast<int64_t>(part) * kPieceChunks;
    const int64_t end = min(a.last, begin + kPieceChunks);

    const auto load_entries = [&](int64_t n) {
      if (n * a.chunk + t >= a.tokens || t >= a.chunk) return;
      const int64_t token = p * a.tokens + n * a.chunk + t, at = (n - a.first_chunk) * a.chunk + t;
      const int64_t stored = p * a.stored_tokens + at;
      const int4* records = a.records + (p * a.stored_chunks * a.chunk + at) * a.writes;
      for (int e = lane; e < a.writes; e += 32) {
        copy_word(entries.write_slot + e, a.k_idx + token * a.writes + e);
        copy_word(entries.write_weight + e, a.k_eff + stored * a.writes + e);
        copy_async(reinterpret_cast<float*>(entries.records + e), reinterpret_cast<const float*>(records + e), true);
      }
      for (int e = lane; e < a.reads; e += 32) {
        copy_word(entries.read_slot + e, a.q_idx + token * a.reads + e);
        copy_word(entries.read_weight + e, a.q_eff + stored * a.reads + e);
      }
    };
    load_entries(begin);
    // What the next chunk needs, but for the rows: its ids come into registers for those.
    const int64_t piece_width = min(static_cast<int64_t>(kColumns), a.width - (column - sub * V)) * sizeof(T);
    const auto prefetch_entries = [&](int64_t n, int (&slots)[2][kMostEntries / 32]) {
      const bool on = n < end && n * a.chunk + t < a.tokens && t < a.chunk;
      const int64_t token = p * a.tokens + n * a.chunk + t, at = (n - a.first_chunk) * a.chunk + t;
#pragma unroll
      for (int h = 0; h < kMostEntries / 32; ++h) {
        const int e = 32 * h + lane;
        slots[0][h] = on && e < a.writes ? a.k_idx[token * a.writes + e] : -1;
        slots[1][h] = on && e < a.reads ? a.q_idx[token * a.reads + e] : -1;
      }
      if (!on) return;
      const int64_t stored = p * a.stored_tokens + at, square = (p * a.stored_chunks * a.chunk + at) * a.chunk;
      if (lane == 0) prefetch(a.k_eff + stored * a.writes, a.writes * sizeof(float));
      if (lane == 1) prefetch(a.q_eff + stored * a.reads, a.reads * sizeof(float));
      if (lane == 2) prefetch(a.records + (p * a.stored_chunks * a.chunk + at) * a.writes, a.writes * sizeof(int4));
      if (lane == 3) prefetch(a.x + square, a.chunk * sizeof(float));
      if (lane == 4) prefetch(a.qx + square, a.chunk * sizeof(float));
      if (lane == 5) prefetch(static_cast<const T*>(a.v) + token * a.width + column - sub * V, piece_width);
    };

    for (int64_t n = begin; n < end; ++n) {
      const int tokens = static_cast<int>(min(static_cast<int64_t>(a.chunk), a.tokens - n * a.chunk));
      const bool on = t < tokens;
      const int64_t token = p * a.tokens + n * a.chunk + t, chunk = p * a.stored_chunks + n - a.first_chunk;
      const int64_t row = p * a.row_stride + a.row_offset + ((n - a.first) * a.chunk + t) * a.width + column;
      const bool writes = on && a.written[p * a.stored_tokens + (n - a.first_chunk) * a.chunk + t] > 0;
      const float beta = on ? a.beta[token] : 0.0f;
      Packed<T, V> value = {};
      if (on && inside) value = load_packed<T, V>(static_cast<const T*>(a.v) + token * a.width + column);
      wait_for_copies();
      __syncwarp();
      const auto slot_of = [&](const int32_t* slots, int e, int count) {
        const int slot = on && inside && e < count ? slots[e] : -1;
        return static_cast<unsigned>(slot) < static_cast<unsigned>(a.num_slots) ? slot : -1;
      };
#pragma unroll 4
      for (int e = team; e < a.writes; e += kTeams) {
        const int slot = slot_of(entries.write_slot, e, a.writes);
        copy_async(reinterpret_cast<float*>(mine + e * kLanes),
                   reinterpret_cast<const float*>(bank + max(slot, 0) * a.width), slot >= 0);
      }
      // The block's rows of X and QX.
      for (int i = threadIdx.x; i < 2 * kTokens * kMostTokens / 4; i += kThreads) {
        const int which = i / (kTokens * kMostTokens / 4), r = i / (kMostTokens / 4) % kTokens;
        const int c = i % (kMostTokens / 4) * 4, mt = rank * kTokens + r;
        float* to = memory.squares[which] + r * kSquareStride + c;
        const float* from = (which == 0 ? a.x : a.qx) + (chunk * a.chunk + mt) * a.chunk + c;
        if (a.chunk % 4 == 0) {
          const bool some = mt < tokens && c < a.chunk;
          copy_async(to, some ? from : a.x, some);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) to[j] = mt < tokens && c + j < a.chunk ? from[j] : 0.0f;
        }
      }
      int next_slots[2][kMostEntries / 32];
      prefetch_entries(n + 1, next_slots);
      // First the records of slots with one entry, then the others.
      int simple = 0, others = 0;
      {
        SlotRecord record[kMostEntries / 32];
        unsigned simple_lanes[kMostEntries / 32], other_lanes[kMostEntries / 32];
#pragma unroll
        for (int h = 0; h < kMostEntries / 32; ++h) {
          const int e = 32 * h + lane;
          record[h] = on && e < a.writes ? SlotRecord{entries.records[e]} : SlotRecord::none();
          const bool first = record[h].slot() >= 0;
          simple_lanes[h] = __ballot_sync(0xffffffffu, first && record[h].single());
          other_lanes[h] = __ballot_sync(0xffffffffu, first && !record[h].single());
          simple += __popc(simple_lanes[h]);
          others += __popc(other_lanes[h]);
          record[h].bits.y |= e << SlotRecord::kItemShift;
        }
        __syncwarp();
        int simple_before = 0, others_before = simple;
#pragma unroll
        for (int h = 0; h < kMostEntries / 32; ++h) {
          const unsigned before = (1u << lane) - 1;
          if (simple_lanes[h] >> lane & 1) {
            entries.records[simple_before + __popc(simple_lanes[h] & before)] = record[h].bits;
          }
          if (other_lanes[h] >> lane & 1) {
            entries.records[others_before + __popc(other_lanes[h] & before)] = record[h].bits;
          }
          simple_before += __popc(simple_lanes[h]);
          others_before += __popc(other_lanes[h]);
        }
        __syncwarp();
      }

      // Reads before this chunk's writes: none begins before all blocks have handed on u.
      float inter[V] = {}, retrieved[V] = {};
      for (int e0 = 0; e0 < a.reads; e0 += kInFlight * kTeams) {
        Packed<T, V> packed[kInFlight];
        float weight[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          const int e = e0 + k * kTeams + team, slot = slot_of(entries.read_slot, e, a.reads);
          packed[k] = {};
          weight[k] = 0;
          if (slot >= 0) {
            weight[k] = entries.read_weight[e];
            packed[k] = load_row<T, V>(bank + slot * a.width);
          }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          float x[V];
          unpack<T, V>(packed[k], x);
#pragma unroll
          for (int i = 0; i < V; ++i) inter[i] += weight[k] * x[i];
        }
      }
      wait_for_copies();  // a lane reads what it copied itself
#pragma unroll 4
      for (int e = team; e < a.writes; e += kTeams) {
        // Rows of dropped entries are zeros.
        const float weight = slot_of(entries.write_slot, e, a.writes) >= 0 ? entries.write_weight[e] : 0.0f;
        float x[V];
        unpack<T, V>(*row_of_entry(e), x);
#pragma unroll
        for (int i = 0; i < V; ++i) retrieved[i] += weight * x[i];
      }
      // The next chunk's rows come into the cache while this one's are worked on.
#pragma unroll
      for (int h = 0; h < kMostEntries / 32; ++h) {
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
          const int slot = next_slots[kind][h];
          if (static_cast<unsigned>(slot) < static_cast<unsigned>(a.num_slots)) {
            prefetch(bank - sub * V + slot * a.width, piece_width);
          }
        }
      }
#pragma unroll
      for (int o = kLanes; o < 32; o *= 2) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          inter[i] += __shfl_xor_sync(0xffffffffu, inter[i], o);
          retrieved[i] += __shfl_xor_sync(0xffffffffu, retrieved[i], o);
        }
      }
      float u[V];
      unpack<T, V>(value, u);
#pragma unroll
      for (int i = 0; i < V; ++i) u[i] = writes ? u[i] - retrieved[i] : 0.0f;
      if (a.error != nullptr && on && inside && team == 0) store<float, V>(a.error + row, u);
#pragma unroll
      for (int i = 0; i < V; ++i) u[i] = writes && inside ? beta * u[i] : 0.0f;
      for (int b = team; b < blocks; b += kTeams) {
        store<float, V>(cluster.map_shared_rank(memory.u, b) + t * Shared::kRowStride + sub * V, u);
      }
      __syncwarp();
      cluster.sync();

      // Columns times tokens of u^T X^T and u^T QX^T; no token needs later ones.
      const int which = warp / (kColumns / 16), m = warp % (kColumns / 16) * 16;
      if (which < 2) {
        const float* square = memory.squares[which];
        const int depth = (rank + 1) * kTokens;
        float sum[4] = {};
        // The tensor cores cut off what they add up; a float32 addition for every 32 of the depth keeps that small.
        for (int k0 = 0; k0 < depth; k0 += 32) {
          float some[4] = {};
#pragma unroll
          for (int k = 0; k < 32; k += 8) {
            if (k0 + k >= depth) break;
            LeftPiece<3> left;
            RightPiece<3> right;
            left.load([&](int r, int d) { return memory.u[(k0 + k + d) * Shared::kRowStride + m + r]; });
            right.load([&](int d, int c) { return square[c * kSquareStride + k0 + k + d]; });
            multiply(some, left, right);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[i] += some[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) memory.products[which][sum_column(i) * kSquareStride + m + sum_row(i)] = sum[i];
      }
      __syncthreads();
      auto handed_on = cluster.barrier_arrive();
      const auto row_of = [&](const float* products, int at, float (&x)[V]) {
#pragma unroll
        for (int i = 0; i < V; i += 4) {
          const float4 q = *reinterpret_cast<const float4*>(products + at * kSquareStride + sub * V + i);
          x[i] = q.x;
          x[i + 1] = q.y;
          x[i + 2] = q.z;
          x[i + 3] = q.w;
        }
      };
      float delta[V];
      row_of(memory.products[0], warp, delta);
      if (on && inside && team == 0) {
        float y[V];
        row_of(memory.products[1], warp, y);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] += inter[i];
        store<T, V>(static_cast<T*>(a.y) + token * a.width + column, y);
        if (a.delta != nullptr) store<float, V>(a.delta + row, delta);
      }
      // The slots that the token names first. `add` gives what their entries write.
      const auto move = [&](const SlotRecord& record, auto add) {
        const Packed<T, V> packed = *row_of_entry(record.item());
        float x[V];
        unpack<T, V>(packed, x);
        if constexpr (S != Save::nothing) {
          const int64_t index = (chunk * a.write_slots + record.index()) * a.width + column;
          if constexpr (S == Save::row) {
            store_packed_streaming<T, V>(static_cast<T*>(a.snapshot) + index, packed);
          } else {
            const Packed<bf16, V> rounded = pack<bf16, V>(x);
            __stcs(reinterpret_cast<uint2*>(static_cast<bf16*>(a.snapshot) + index),
                   make_uint2(rounded.word[0], rounded.word[1]));
          }
        }
#pragma unroll
        for (int i = 0; i < V; ++i) x[i] *= record.decay();
        add(x);
        store<T, V>(bank + record.slot() * a.width, x);
      };
      if (inside) {
#pragma unroll 4
        for (int i = team; i < simple; i += kTeams) {
          const SlotRecord record{entries.records[i]};
          move(record, [&](float (&x)[V]) {
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] += record.weight() * delta[j];
          });
        }
      }
      __syncwarp();
      cluster.barrier_wait(std::move(handed_on));
      if (inside) {
        const SlotRecords all{a.records + chunk * a.chunk * a.writes,
                              {},
                              a.k_carry + (p * a.stored_tokens + (n - a.first_chunk) * a.chunk) * a.writes,
                              nullptr};
        for (int i = team; i < others; i += kTeams) {
          const SlotRecord record{entries.records[simple + i]};
          move(record, [&](float (&x)[V]) {
            all.for_writes(record, t * a.writes + record.item(), [&](int position, float weight) {
              const int other = a.by_writes(position);
              float d[V];
              row_of(cluster.map_shared_rank(memory.products[0], other / kTokens), other % kTokens, d);
#pragma unroll
              for (int j = 0; j < V; ++j) x[j] += weight * d[j];
            });
          });
        }
      }
      __syncwarp();
      if (n + 1 == end) __threadfence();
      auto moved = cluster.barrier_arrive();
      if (n + 1 < end) load_entries(n + 1);
      cluster.barrier_wait(std::move(moved));
    }
    if (rank == 0 && threadIdx.x == 0) {
      __threadfence();
      asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(a.progress + task), "r"(part + 1u) : "memory");
    }
  }
}
#endif

template <class T, int V, Save S>
__global__ void __launch_bounds__(kThreads, 2) forward_steps_kernel(const __grid_constant__ Params a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  steps<T, V, S>(a);
#endif
}

bool has_clusters() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

}  // namespace

bool runs_as_one_kernel(const Forward& f) {
  const Shape& s = f.shape;
  const int64_t vector = f.dtype == DType::bf16 ? kVector<bf16> : kVector<float>;
  return s.chunk <= kMostTokens && s.writes <= kMostEntries && s.reads <= kMostEntries && s.width % vector == 0 &&
         has_clusters();
}

cudaError_t reset_steps(const Forward& f, Launch where) {
  const int64_t slices = div_up(f.shape.width, kLanes * kVector<float>);  // at least as many as tasks of a stream
  return cudaMemsetAsync(f.inter, 0, sizeof(unsigned) * (1 + f.shape.streams * slices), where.stream);
}

cudaError_t forward_steps(const Forward& f, int64_t first, int64_t count, Launch where) {
  const Shape& s = f.shape;
  if (count <= 0) return cudaSuccess;
  cudaError_t error = reset_steps(f, where);
  if (error != cudaSuccess) return error;
  const Quant quant = effective(f.quant, f.dtype);
  Params a = {};
  a.bank = f.bank;
  a.k_idx = f.in.k_idx;
  a.q_idx = f.in.q_idx;
  a.written = f.chunks.writes;
  a.k_eff = static_cast<const float*>(f.chunks.k_eff);
  a.q_eff = static_cast<const float*>(f.chunks.q_eff);
  a.k_carry = static_cast<const float*>(f.chunks.k_carry);
  a.beta = static_cast<const float*>(f.in.beta);
  a.x = static_cast<const float*>(f.x);
  a.qx = static_cast<const float*>(f.qx);
  a.records = static_cast<const int4*>(f.records);
  a.v = f.in.v;
  a.y = f.y;
  a.error = static_cast<float*>(f.error);
  a.delta = f.one_chunk_rows ? nullptr : static_cast<float*>(f.delta);
  a.snapshot = quant == Quant::none || quant == Quant::bf16 ? f.snapshot : nullptr;  // else taken before
  // The whole forward needs no `inter`.
  a.taken = static_cast<unsigned*>(f.inter);
  a.progress = a.taken + 1;
  a.width = s.width;
  a.tokens = s.tokens;
  a.stored_tokens = s.stored_tokens;
  a.stored_chunks = s.stored_chunks;
  a.bank_stride = s.slots * s.width;
  a.row_stride = f.row_stride();
  a.row_offset = f.row_offset(first);
  a.first_chunk = s.first_chunk;
  a.first = first;
  a.last = first + count;
  a.chunk = static_cast<int>(s.chunk);
  a.writes = static_cast<int>(s.writes);
  a.reads = static_cast<int>(s.reads);
  a.write_slots = static_cast<int>(s.write_slots);
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  a.by_writes = Divider(s.writes);
  const auto run = [&](auto type) {
    using T = decltype(type);
    constexpr int V = kVector<T>;
    using Shared = Memory<kLanes * V>;
    a.slices = static_cast<int>(div_up(s.width, kLanes * V));
    a.tasks = static_cast<int>(s.streams) * a.slices;
    a.pieces = a.tasks * static_cast<int>(div_up(count, kPieceChunks));
    auto kernel = forward_steps_kernel<T, V, Save::nothing>;
    if (a.snapshot != nullptr) {
      kernel = quant == Quant::none ? forward_steps_kernel<T, V, Save::row> : forward_steps_kernel<T, V, Save::bf16>;
    }
    const int bytes = static_cast<int>(sizeof(Shared)) + kTokens * a.writes * kLanes * 16;
    error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    const unsigned blocks = static_cast<unsigned>(div_up(s.chunk, kTokens));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(a.tasks) * blocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = where.stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, a);
  };
  return f.dtype == DType::bf16 ? run(bf16{}) : run(float{});
}

}  // namespace sdm::gpu
