// All steps of the forward in one kernel: gather, dual matmul and mover of a chunk after another (sections 3
// and 5 of the specification). Columns never meet, so a cluster of blocks takes the 128 bytes of a slice of one
// stream's rows through the chunks, eight tokens a block, a warp a token. The rows that the token writes wait in
// shared memory from the gather to the mover; the blocks hand each other u, and the delta of slots that tokens of
// several blocks write. Moves each row that is read, and each that is written in and out, once. Bound by the chain of
// a step: loads, two exchanges, products, stores.
#include "cuda/common/cluster_steps.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

using namespace cluster;

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
  int64_t width, tokens, stored_tokens, stored_chunks, bank_stride, row_stride, row_offset;
  int64_t first_chunk, first, last;  // stored chunks begin at first_chunk; steps first .. last
  Pieces pieces;
  int chunk, writes, reads, write_slots, slices, streams_per_bank, num_slots;
  Divider by_writes;
};

// A warp's entries of one chunk.
struct Entries {
  int4 records[kMostEntries];
  int2 second[kMostEntries];  // of slots with several, in the order of their records: the second one's next, and weight
  int32_t write_slot[kMostEntries], read_slot[kMostEntries];
  float write_weight[kMostEntries], read_weight[kMostEntries];
  float carry[kMostEntries];  // of the first entry of each of these
};

template <int kColumns>
struct Memory {
  static constexpr int kRowStride = kColumns + 8;
  float u[kMostTokens * kRowStride];
  float squares[2][kTokens * kSquareStride];   // rows of X and QX
  float products[2][kTokens * kSquareStride];  // delta and QX u of the block's tokens
  Entries entries[kTokens];
  Signal corrections, rows_moved;  // all blocks have sent u, have moved their rows
  unsigned piece[2];               // of this one, and of the next
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
template <class T, int V, Save S>
__device__ void steps(const Params& a) {
  constexpr int kColumns = kLanes * V;
  using Shared = Memory<kColumns>;
  extern __shared__ __align__(16) unsigned char shared[];
  Shared& memory = *reinterpret_cast<Shared*>(shared);
  uint4* held = reinterpret_cast<uint4*>(shared + sizeof(Shared));  // [8 tokens][W][8 lanes]
  const cooperative_groups::cluster_group group = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(group.block_rank()), blocks = static_cast<int>(group.num_blocks());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = lane / kLanes, sub = lane % kLanes;
  const int t = rank * kTokens + warp;  // of the chunk
  Entries& entries = memory.entries[warp];
  uint4* mine = held + warp * a.writes * kLanes + sub;
  const auto row_of_entry = [&](int e) { return reinterpret_cast<const Packed<T, V>*>(mine + e * kLanes); };

  if (threadIdx.x == 0) {
    memory.corrections.start(1);
    memory.rows_moved.start(blocks);
  }
  group.sync();  // each block has started before another writes to its memory
  const int row_bytes = static_cast<int>(a.width * sizeof(T));
  const auto load_entries = [&](int64_t p, int64_t n) {
    if (n * a.chunk + t >= a.tokens || t >= a.chunk) return;
    const int64_t token = p * a.tokens + n * a.chunk + t, at = (n - a.first_chunk) * a.chunk + t;
    const int64_t stored = p * a.stored_tokens + at;
    const int4* records = a.records + (p * a.stored_chunks * a.chunk + at) * a.writes;
    for (int e = lane; e < a.writes; e += 32) {
      copy_words(entries.write_slot + e, a.k_idx + token * a.writes + e);
      copy_words(entries.write_weight + e, a.k_eff + stored * a.writes + e);
      copy_vector(entries.records + e, records + e, true);
    }
    for (int e = lane; e < a.reads; e += 32) {
      copy_words(entries.read_slot + e, a.q_idx + token * a.reads + e);
      copy_words(entries.read_weight + e, a.q_eff + stored * a.reads + e);
    }
  };
  int round = 0, number = 0;
  take_piece(group, a.pieces, memory.piece);
  group.sync();
  Piece piece(a.pieces, memory.piece[0]);
  if (piece.some) load_entries(piece.task / a.slices, a.first + piece.part * kPieceChunks);
  while (piece.some) {
    wait_for_piece(a.pieces, piece);
    const int64_t p = piece.task / a.slices;
    const int64_t column = static_cast<int64_t>(piece.task % a.slices) * kColumns + sub * V;
    const bool inside = column < a.width;
    T* slice = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column - sub * V;
    const auto bank_row = [&](int slot) {
      return reinterpret_cast<T*>(reinterpret_cast<char*>(slice + sub * V) + static_cast<int64_t>(slot) * row_bytes);
    };
    const int64_t begin = piece.begin(a.first);
    const int64_t end = min(a.last, begin + kPieceChunks);
    // All blocks know the next piece after the first round of this one.
    take_piece(group, a.pieces, memory.piece + (number + 1) % 2);

    for (int64_t n = begin; n < end; ++n, ++round) {
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
      const int write_count = on && inside ? a.writes : 0, read_count = on && inside ? a.reads : 0;
      const auto valid = [&](int slot) {
        return static_cast<unsigned>(slot) < static_cast<unsigned>(a.num_slots) ? slot : -1;
      };
#pragma unroll 4
      for (int e = team; e < a.writes; e += kTeams) {
        const int slot = e < write_count ? valid(entries.write_slot[e]) : -1;
        copy_vector(mine + e * kLanes, bank_row(max(slot, 0)), slot >= 0);
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
      // The next chunk's ids, and all else of it but its rows, come closer.
      int64_t next_p = p, next_n = n + 1;
      int next_slice = piece.task % a.slices;
      bool next_on = n + 1 < end;
      if (n + 1 == end && n > begin) {
        const Piece next(a.pieces, memory.piece[(number + 1) % 2]);
        next_on = next.some;
        next_p = next.task / a.slices;
        next_n = next.begin(a.first);
        next_slice = next.task % a.slices;
      }
      const int slice_bytes =
          static_cast<int>(min(kColumns, static_cast<int>(a.width) - next_slice * kColumns) * sizeof(T));
      const T* next_rows =
          static_cast<const T*>(a.bank) + next_p / a.streams_per_bank * a.bank_stride + next_slice * kColumns;
      int next_writes[kHalves], next_reads[kHalves];
      const bool next_token = next_on && next_n * a.chunk + t < a.tokens && t < a.chunk;
      const int64_t next = next_p * a.tokens + next_n * a.chunk + t;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int e = 32 * h + lane;
        next_writes[h] = next_token && e < a.writes ? a.k_idx[next * a.writes + e] : -1;
        next_reads[h] = next_token && e < a.reads ? a.q_idx[next * a.reads + e] : -1;
      }
      if (next_token) {
        const int64_t at = (next_n - a.first_chunk) * a.chunk + t, stored = next_p * a.stored_tokens + at;
        const int64_t square = next_p * a.stored_chunks * a.chunk + at;
        prefetch_all(a.k_eff + stored * a.writes, a.writes * 4);
        prefetch_all(a.q_eff + stored * a.reads, a.reads * 4);
        prefetch_all(a.records + square * a.writes, a.writes * 16);
        prefetch_all(a.x + square * a.chunk, a.chunk * 4);
        prefetch_all(a.qx + square * a.chunk, a.chunk * 4);
        prefetch_all(static_cast<const T*>(a.v) + next * a.width + next_slice * kColumns, slice_bytes);
      }
      int simple, others;
      sort_records(entries.records, on ? a.writes : 0, &simple, &others);
      // What slots of several entries need comes with the rows.
      const int4* records = a.records + chunk * a.chunk * a.writes;
      for (int i = lane; i < others; i += 32) {
        const SlotRecord record{entries.records[simple + i]};
        copy_words<2>(entries.second + i, &records[record.link()].z);
        copy_words(entries.carry + i,
                   a.k_carry + (p * a.stored_tokens + (n - a.first_chunk) * a.chunk + t) * a.writes + record.item());
      }

      // Reads before this chunk's writes: none begins before all blocks have handed on u.
      float inter[V] = {}, retrieved[V] = {};
      for (int e0 = 0; e0 < a.reads; e0 += kInFlight * kTeams) {
        Packed<T, V> packed[kInFlight];
        float weight[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          const int e = e0 + k * kTeams + team, slot = e < read_count ? valid(entries.read_slot[e]) : -1;
          packed[k] = {};
          weight[k] = 0;
          if (slot >= 0) {
            weight[k] = entries.read_weight[e];
            packed[k] = load_row<T, V>(bank_row(slot));
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
      // A lane reads the part of a row that it copied itself; the rest is for others, after a barrier of the block.
      wait_for_copies();
#pragma unroll 4
      for (int e = team; e < a.writes; e += kTeams) {
        const float weight = e < write_count ? entries.write_weight[e] : 0.0f;  // dropped entries: zeros both
        float x[V];
        unpack<T, V>(*row_of_entry(e), x);
#pragma unroll
        for (int i = 0; i < V; ++i) retrieved[i] += weight * x[i];
      }
      // The next chunk's rows come into the cache while this one's are worked on.
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        next_writes[h] = valid(next_writes[h]);
        next_reads[h] = valid(next_reads[h]);
      }
      if (next_on) {
        prefetch_rows<kLanes * 16>(next_rows, row_bytes, next_writes, a.writes, slice_bytes);
        prefetch_rows<kLanes * 16>(next_rows, row_bytes, next_reads, a.reads, slice_bytes);
      }
      // Before u is handed on: others then write the rows that were read.
      sum_teams(inter);
      sum_teams(retrieved);
      float u[V];
      unpack<T, V>(value, u);
#pragma unroll
      for (int i = 0; i < V; ++i) u[i] = writes ? u[i] - retrieved[i] : 0.0f;
      if (a.error != nullptr && on && inside && team == 0) store<float, V>(a.error + row, u);
#pragma unroll
      for (int i = 0; i < V; ++i) u[i] = writes && inside ? beta * u[i] : 0.0f;
      if (threadIdx.x == 0) memory.corrections.expect(blocks * kTokens * kColumns * sizeof(float));
      for (int b = team; b < blocks; b += kTeams) {
        const float* to = memory.u + t * Shared::kRowStride + sub * V;
#pragma unroll
        for (int i = 0; i < V; i += 4) memory.corrections.send(b, to + i, u[i], u[i + 1], u[i + 2], u[i + 3]);
      }
      __syncthreads();  // the rows of X and QX, too
      memory.corrections.wait(round);

      // Columns times tokens of u^T X^T and u^T QX^T; no token needs later ones.
      const int which = warp / (kColumns / 16), m = warp % (kColumns / 16) * 16;
      if (which < 2) {
        const float* square = memory.squares[which];
        float sum[4] = {};
        product(
            sum, (rank + 1) * kTokens, [&](int r, int d) { return memory.u[d * Shared::kRowStride + m + r]; },
            [&](int d, int c) { return square[c * kSquareStride + d]; });
#pragma unroll
        for (int i = 0; i < 4; ++i) memory.products[which][sum_column(i) * kSquareStride + m + sum_row(i)] = sum[i];
      }
      __syncthreads();
      auto products_made = group.barrier_arrive();
      const auto row_of = [&](const float* products, int at, float (&x)[V]) {
        load_floats<V>(products + at * kSquareStride + sub * V, x);
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
      const int64_t snapshot_row = chunk * a.write_slots * a.width + column;
      const auto move = [&](const SlotRecord& record, auto add) {
        const Packed<T, V> packed = *row_of_entry(record.item());
        float x[V];
        unpack<T, V>(packed, x);
        if constexpr (S != Save::nothing) {
          const int64_t index = snapshot_row + record.index() * a.width;
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
        store<T, V>(bank_row(record.slot()), x);
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
      group.barrier_wait(std::move(products_made));
      if (inside) {
        for (int i = team; i < others; i += kTeams) {
          const SlotRecord record{entries.records[simple + i]};
          move(record, [&](float (&x)[V]) {
            const float carry = entries.carry[i];
#pragma unroll
            for (int j = 0; j < V; ++j) x[j] += carry * delta[j];
            int position = record.link();
            for (SlotRecord further = SlotRecord::entry(entries.second[i].x, __int_as_float(entries.second[i].y));;) {
              const int other = a.by_writes(position);
              float d[V];
              row_of(group.map_shared_rank(memory.products[0], other / kTokens), other % kTokens, d);
#pragma unroll
              for (int j = 0; j < V; ++j) x[j] += further.weight() * d[j];
              position = further.next();
              if (position < 0) break;
              further = SlotRecord{records[position]};
            }
          });
        }
      }
      __syncthreads();
      if (threadIdx.x < blocks) memory.rows_moved.give(threadIdx.x);
      if (next_on) load_entries(next_p, next_n);
      memory.rows_moved.wait(round);
    }
    finish_piece(group, a.pieces, piece);
    ++number;
    const Piece next(a.pieces, memory.piece[number % 2]);
    if (end - begin == 1 && next.some) {  // it came too late for the above
      load_entries(next.task / a.slices, next.begin(a.first));
    }
    piece = next;
  }
  group.sync();  // nobody leaves while others may reach into its memory
}
#endif

template <class T, int V, Save S>
__global__ void __launch_bounds__(kThreads, 2) forward_steps_kernel(const __grid_constant__ Params a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  steps<T, V, S>(a);
#endif
}

template <class T>
size_t shared_bytes(const Shape& s) {
  return sizeof(Memory<kLanes * kVector<T>>) + static_cast<size_t>(kTokens * s.writes * kLanes * 16);
}

static_assert(2 * (sizeof(Memory<kLanes * kVector<bf16>>) + kTokens * kMostEntries * kLanes * 16 + 1024) <= 228 * 1024,
              "two blocks, and what the device keeps for each, fit a multiprocessor's shared memory");

// At least as many as tasks: slices of float32 rows.
int64_t most_tasks(const Shape& s) { return s.streams * div_up(s.width, kLanes * kVector<float>); }

}  // namespace

bool runs_as_one_kernel(const Forward& f) {
  if (f.dtype == DType::bf16) return serves(f.shape, kVector<bf16>, shared_bytes<bf16>(f.shape));
  return serves(f.shape, kVector<float>, shared_bytes<float>(f.shape));
}

cudaError_t reset_steps(const Forward& f, Launch where) { return reset(f.inter, most_tasks(f.shape), where); }

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
    a.slices = static_cast<int>(div_up(s.width, kLanes * V));
    a.pieces = pieces_of(f.inter, s.streams * a.slices, count);  // nothing else needs `inter`
    auto kernel = forward_steps_kernel<T, V, Save::nothing>;
    if (a.snapshot != nullptr) {
      kernel = quant == Quant::none ? forward_steps_kernel<T, V, Save::row> : forward_steps_kernel<T, V, Save::bf16>;
    }
    return cluster::launch(kernel, a, s, a.pieces.tasks, shared_bytes<T>(s), where);
  };
  return f.dtype == DType::bf16 ? run(bf16{}) : run(float{});
}

}  // namespace sdm::gpu
