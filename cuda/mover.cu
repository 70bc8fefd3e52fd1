// Mover: M[s] <- exp(L) M[s] + sum of k_carry delta, one visit of a row for each distinct slot of a
// chunk, which also stores the row as the snapshot where no scale is needed (sections 3 and 5 of the
// specification). A warp takes up to 32 entries of a token in a slice of columns: the slots that it names first,
// with the token's row of delta in registers. Moves each written row in and out once (its read comes out of
// the cache that the gather filled); bound by memory.
//
// The lists and the first rows are on chip before the dual matmul that makes delta has ended: the lists do not change,
// and all rows were last written before the gather of this chunk began.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 4;  // rows that a team of lanes holds at once
constexpr int kItems = WarpRecords::kItems;

enum class Save { none, row, bf16 };

struct Params {
  void* bank;
  const int32_t *slots, *starts, *order;
  const int4* records;  // or null
  const float *carry, *decay, *delta;
  void* snapshot;
  int64_t width, bank_stride, slots_stride, starts_stride, order_stride, carry_stride, delta_stride, snapshot_stride;
  int64_t begin, first_stream;
  int columns, slices, groups, per_token, token_warps, tokens, most, entries, streams_per_bank, num_slots;
  Divider by_writes;
};

template <class T, int V, int Columns, Save S>
__global__ void __launch_bounds__(kThreads, 3) mover_kernel(const __grid_constant__ Params a) {
  using Lanes = SliceLanes<V, Columns>;
  constexpr int kTeams = 32 / Lanes::lanes;
  __shared__ SlotRecord shared[kWarps][WarpRecords::kRoom];
  const int slice = blockIdx.x % a.slices, group = blockIdx.x / a.slices % a.groups;
  const int64_t p = a.first_stream + blockIdx.x / a.slices / a.groups;
  const int warp = threadIdx.x / 32, team = threadIdx.x % 32 / Lanes::lanes, lane = threadIdx.x % Lanes::lanes;
  // The token, and which of its entries; without records items are slots, and there is no token.
  const int index = group * kWarps + warp, token = index / a.token_warps, skipped = index % a.token_warps * kItems;
  const int64_t column0 = a.begin + slice * Columns;
  const int columns = min(Columns, a.columns - slice * Columns);
  T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column0;
  const int row_bytes = static_cast<int>(a.width * sizeof(T));
  const SlotLists lists{a.slots + p * a.slots_stride,
                        a.starts + p * a.starts_stride,
                        a.order + p * a.order_stride,
                        a.most,
                        a.entries,
                        a.num_slots};
  const SlotRecords all{a.records == nullptr ? nullptr : a.records + p * a.order_stride, lists,
                        a.carry + p * a.carry_stride, a.decay + p * a.slots_stride};
  const WarpRecords records(all, shared[warp], token * a.per_token + skipped, a.per_token - skipped, true, 1, 1);
  Packed<T, V> packed[kHeld][Lanes::steps];
  const auto load_rows = [&](const SlotRecord& record, int k) {
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      const int c = Lanes::column(lane, s);
      packed[k][s] = {};
      if (record.slot() >= 0 && c < columns) packed[k][s] = load_row<T, V>(row_at(bank + c, record.slot(), row_bytes));
    }
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) load_rows(records.simple_at(k * kTeams + team), k);
  wait_for_previous();

  // A lane's part of the delta of one token.
  const auto delta_of = [&](int t, int s, float (&d)[V]) {
    const int c = Lanes::column(lane, s);
    if (c < columns) unpack<float, V>(load_row<float, V>(a.delta + p * a.delta_stride + column0 + t * a.width + c), d);
  };
  // Stores the snapshot, decays the row, and stores what `add` makes of it.
  const auto move = [&](const SlotRecord& record, int k, auto add) {
    float row[Lanes::steps][V];
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      unpack<T, V>(packed[k][s], row[s]);
      if constexpr (S != Save::none) {
        const int c = Lanes::column(lane, s);
        const int64_t at = p * a.snapshot_stride + record.index() * a.width + column0 + c;
        if (c < columns) {
          if constexpr (S == Save::row) {
            store_packed_streaming<T, V>(static_cast<T*>(a.snapshot) + at, packed[k][s]);
          } else {
#pragma unroll
            for (int j = 0; j < V; ++j) from_float(static_cast<bf16*>(a.snapshot) + at + j, row[s][j]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < V; ++j) row[s][j] *= record.decay();
    }
    add(row);
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      const int c = Lanes::column(lane, s);
      if (c < columns) store_row<T, V>(row_at(bank + c, record.slot(), row_bytes), row[s]);
    }
  };
  const bool own = all.stored != nullptr && token < a.tokens;
  float delta[Lanes::steps][V] = {};
#pragma unroll
  for (int s = 0; s < Lanes::steps; ++s) {
    if (own) delta_of(token, s, delta[s]);
  }
  for (int base = 0; base < records.simple; base += kTeams * kHeld) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = base + k * kTeams + team;
      const SlotRecord record = records.simple_at(i);
      if (record.slot() >= 0) {
        move(record, k, [&](float (&row)[Lanes::steps][V]) {
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
            for (int j = 0; j < V; ++j) row[s][j] += record.weight() * delta[s][j];
          }
        });
      }
      load_rows(records.simple_at(i + kTeams * kHeld), k);
    }
  }
  for (int i = team; i < records.others; i += kTeams) {  // slots of several entries
    const SlotRecord record = records.other_at(i);
    load_rows(record, 0);
    move(record, 0, [&](float (&row)[Lanes::steps][V]) {
      const auto look_up = [&](int position, float weight) {
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          float d[V] = {};
          delta_of(a.by_writes(position), s, d);
#pragma unroll
          for (int j = 0; j < V; ++j) row[s][j] += weight * d[j];
        }
      };
      if (own) {  // the first entry is the token's
        const float weight = all.weights[records.position(record)];
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
          for (int j = 0; j < V; ++j) row[s][j] += weight * delta[s][j];
        }
      }
      all.for_further_writes(record, look_up);
    });
  }
  let_next_start();
}

}  // namespace

cudaError_t mover(const Forward& f, int64_t n, Range range, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  const int64_t first_entry = c.stored_chunk * s.chunk * s.writes;
  Params a = {};
  a.bank = f.bank;
  a.slots = f.chunks.slots + c.stored_chunk * s.write_slots;
  a.starts = f.chunks.starts + c.stored_chunk * (s.write_slots + 1);
  a.order = f.chunks.order + first_entry;
  a.records = f.records == nullptr ? nullptr : static_cast<const int4*>(f.records) + first_entry;
  a.carry = at<float>(f.chunks.k_carry, c.stored_token * s.writes);
  a.decay = at<float>(f.chunks.decay, c.stored_chunk * s.write_slots);
  a.delta = at<float>(f.delta, f.row_offset(n));
  a.width = s.width;
  a.bank_stride = s.slots * s.width;
  a.slots_stride = s.stored_chunks * s.write_slots;
  a.starts_stride = s.stored_chunks * (s.write_slots + 1);
  a.order_stride = s.stored_chunks * s.chunk * s.writes;
  a.carry_stride = s.stored_tokens * s.writes;
  a.delta_stride = f.row_stride();
  a.snapshot_stride = s.stored_chunks * s.write_slots * s.width;
  a.begin = range.begin;
  a.first_stream = range.first_stream;
  a.columns = static_cast<int>(range.end - range.begin);
  a.slices = static_cast<int>(div_up(a.columns, slice_columns(s)));
  a.tokens = c.tokens;
  a.most = static_cast<int>(s.write_slots);
  a.entries = c.tokens * static_cast<int>(s.writes);
  // Without records, a warp takes slots in the order of the list.
  a.per_token = a.records != nullptr ? static_cast<int>(s.writes) : kItems;
  a.token_warps = static_cast<int>(div_up(a.per_token, kItems));
  const int64_t tokens = a.records != nullptr ? c.tokens : div_up(a.most, kItems);
  a.groups = static_cast<int>(div_up(tokens * a.token_warps, kWarps));
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  a.by_writes = Divider(s.writes);
  const Quant quant = effective(f.quant, f.dtype);
  const bool saves = f.snapshot != nullptr && (quant == Quant::none || quant == Quant::bf16);
  const int64_t first = c.stored_chunk * s.write_slots * s.width;
  if (saves) {
    a.snapshot = f.dtype == DType::f32 && quant == Quant::none ? static_cast<void*>(at<float>(f.snapshot, first))
                                                               : static_cast<void*>(at<bf16>(f.snapshot, first));
  }
  return for_rows(f.dtype, s.width, [&](auto type, auto v) {
    using T = decltype(type);
    constexpr int V = decltype(v)::value;
    const auto run = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      auto kernel = mover_kernel<T, V, kColumns, Save::none>;
      if (saves) {
        kernel =
            quant == Quant::none ? mover_kernel<T, V, kColumns, Save::row> : mover_kernel<T, V, kColumns, Save::bf16>;
      }
      return launch(kernel, dim3(a.slices * a.groups * range.streams), kThreads, 0, where, a);
    };
    if constexpr (V > 1) {
      if (has_wide_slices(s)) return run(std::integral_constant<int, kWideSlice>{});
    }
    return run(std::integral_constant<int, kSlice>{});
  });
}

}  // namespace sdm::gpu
