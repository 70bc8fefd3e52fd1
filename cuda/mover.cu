// Mover: M[s] <- exp(L) M[s] + sum of k_carry delta, one visit of a row for each distinct slot of a
// chunk, which also stores the row as the snapshot where no scale is needed (sections 3 and 5 of the
// specification). A block takes a slice of 64 columns of a group of slots, with the chunk's delta of
// that slice in shared memory. Moves each written row in and out once (its read comes out of the cache
// that the gather filled); bound by memory.
//
// Everything but delta is on chip before the dual matmul that makes it has ended: the lists do not
// change, and the rows were last written before the gather of this chunk began.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kHeld = 8;  // rows that a team of lanes holds at once

enum class Save { none, row, bf16 };

struct Params {
  void* bank;
  const int32_t *slots, *starts, *order;
  const int4* records;  // or null
  const float *carry, *decay, *delta;
  void* snapshot;
  int64_t width, bank_stride, slots_stride, starts_stride, order_stride, carry_stride, delta_stride, snapshot_stride;
  int64_t begin, first_stream;
  int columns, slices, groups, passes, tokens, most, entries, streams_per_bank, num_slots;
  Divider by_writes;
};

template <class T, int V, Save S>
__global__ void __launch_bounds__(kThreads, 3) mover_kernel(const __grid_constant__ Params a) {
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = kThreads / Lanes::lanes;
  constexpr int kSlots = kTeams * kHeld;
  extern __shared__ __align__(16) float staged[];  // [C][64]
  __shared__ SlotRecord record[kSlots];
  const int slice = blockIdx.x % a.slices, group = blockIdx.x / a.slices % a.groups;
  const int64_t p = a.first_stream + blockIdx.x / a.slices / a.groups;
  const int lane = threadIdx.x % Lanes::lanes, team = threadIdx.x / Lanes::lanes;
  const int64_t column0 = a.begin + slice * kSlice;
  const int columns = min(kSlice, a.columns - slice * kSlice);
  T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column0;
  const SlotLists lists{a.slots + p * a.slots_stride,
                        a.starts + p * a.starts_stride,
                        a.order + p * a.order_stride,
                        a.most,
                        a.entries,
                        a.num_slots};
  const float* carry = a.carry + p * a.carry_stride;
  const float* decay = a.decay + p * a.slots_stride;

  const int4* records = a.records == nullptr ? nullptr : a.records + p * a.slots_stride;
  for (int pass = 0; pass < a.passes; ++pass) {
    const int first = (group * a.passes + pass) * kSlots;
    if (pass > 0) __syncthreads();
    for (int i = threadIdx.x; i < kSlots; i += kThreads) record[i] = record_of(records, lists, first + i, decay, carry);
    __syncthreads();
    Packed<T, V> packed[kHeld][Lanes::steps];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = record[k * kTeams + team].slot();
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        packed[k][s] = {};
        if (slot >= 0 && c < columns) packed[k][s] = load_row<T, V>(bank + slot * a.width + c);
      }
    }
    if (pass == 0) {
      wait_for_previous();
      stage_slice<V>(staged, a.delta + p * a.delta_stride + column0, a.width, a.tokens, columns, [](int, auto&) {});
      __syncthreads();
    }
    if (record[0].slot() < 0) break;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const SlotRecord& mine = record[k * kTeams + team];
      const int i = first + k * kTeams + team, slot = mine.slot();
      if (slot < 0) break;
      float row[Lanes::steps][V];
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        unpack<T, V>(packed[k][s], row[s]);
        if constexpr (S != Save::none) {
          const int c = Lanes::column(lane, s);
          const int64_t index = p * a.snapshot_stride + i * a.width + column0 + c;
          if (c < columns) {
            if constexpr (S == Save::row) {
              store_packed_streaming<T, V>(static_cast<T*>(a.snapshot) + index, packed[k][s]);
            } else {
#pragma unroll
              for (int j = 0; j < V; ++j) from_float(static_cast<bf16*>(a.snapshot) + index + j, row[s][j]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < V; ++j) row[s][j] *= mine.decay();
      }
      const auto add = [&](int position, float weight) {
        const float* from = staged + a.by_writes(position) * kSlice;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          float d[V];
          load_staged<V>(from, lane, s, d);
#pragma unroll
          for (int j = 0; j < V; ++j) row[s][j] += weight * d[j];
        }
      };
      if (mine.single()) {
        add(mine.position(), mine.weight());
      } else {
        for (int e = lists.begin(i); e < lists.end(i); ++e) {
          const int position = lists.position(e);
          if (position >= 0) add(position, carry[position]);
        }
      }
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        if (c < columns) store<T, V>(bank + slot * a.width + c, row[s]);
      }
    }
  }
  let_next_start();
}

}  // namespace

cudaError_t mover(const Forward& f, int64_t n, Range range, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  Params a = {f.bank,
              f.chunks.slots + c.stored_chunk * s.write_slots,
              f.chunks.starts + c.stored_chunk * (s.write_slots + 1),
              f.chunks.order + c.stored_chunk * s.chunk * s.writes,
              f.records == nullptr ? nullptr : static_cast<const int4*>(f.records) + c.stored_chunk * s.write_slots,
              at<float>(f.chunks.k_carry, c.stored_token * s.writes),
              at<float>(f.chunks.decay, c.stored_chunk * s.write_slots),
              at<float>(f.delta, f.row_offset(n)),
              nullptr,
              s.width,
              s.slots * s.width,
              s.stored_chunks * s.write_slots,
              s.stored_chunks * (s.write_slots + 1),
              s.stored_chunks * s.chunk * s.writes,
              s.stored_tokens * s.writes,
              f.row_stride(),
              s.stored_chunks * s.write_slots * s.width,
              range.begin,
              range.first_stream,
              static_cast<int>(range.end - range.begin),
              0,
              0,
              0,
              c.tokens,
              static_cast<int>(s.write_slots),
              c.tokens * static_cast<int>(s.writes),
              static_cast<int>(s.streams_per_bank),
              static_cast<int>(s.slots),
              Divider(s.writes)};
  a.slices = static_cast<int>(div_up(a.columns, kSlice));
  const Quant quant = effective(f.quant, f.dtype);
  const bool fused = f.snapshot != nullptr && (quant == Quant::none || quant == Quant::bf16);
  const int64_t first = c.stored_chunk * s.write_slots * s.width;
  if (fused) {
    a.snapshot = f.dtype == DType::f32 && quant == Quant::none ? static_cast<void*>(at<float>(f.snapshot, first))
                                                               : static_cast<void*>(at<bf16>(f.snapshot, first));
  }
  return for_rows(f.dtype, s.width, [&](auto type, auto v) {
    using T = decltype(type);
    constexpr int V = decltype(v)::value;
    auto kernel = mover_kernel<T, V, Save::none>;
    if (fused) kernel = quant == Quant::none ? mover_kernel<T, V, Save::row> : mover_kernel<T, V, Save::bf16>;
    const int64_t per_pass = kThreads / SliceLanes<V>::lanes * kHeld;
    a.passes = mover_passes(s.chunk, kHeld);
    a.groups = static_cast<int>(div_up(std::min<int64_t>(s.write_slots, a.entries), per_pass * a.passes));
    return launch(kernel, dim3(a.slices * a.groups * range.streams), kThreads, sizeof(float) * c.tokens * kSlice, where,
                  a);
  });
}

}  // namespace sdm::gpu
