// Mover: M[s] <- exp(L) M[s] + sum of k_carry delta, one visit of a row for each distinct slot of a
// chunk, which also stores the row as the snapshot where no scale is needed (sections 3 and 5 of the
// specification). A block takes a slice of 64 columns of a group of slots, with the chunk's delta of
// that slice in shared memory. Moves each written row in and out once (its read comes out of the cache
// that the gather filled); bound by memory.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // rows that a group of lanes loads at once

enum class Save { none, row, bf16 };

struct Params {
  void* bank;
  const int32_t *slots, *starts, *order;
  const float *carry, *decay, *delta;
  void* snapshot;
  int64_t width, bank_stride, slots_stride, starts_stride, order_stride, carry_stride, delta_stride, snapshot_stride;
  int64_t begin;
  int columns, slices, groups, tokens, writes, most, entries, streams_per_bank, num_slots;
  Divider by_writes;
};

template <class T, int V, Save S>
__global__ void __launch_bounds__(kThreads) mover_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) float staged[];  // [C][64]
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = kThreads / Lanes::lanes;
  const int slice = blockIdx.x % a.slices, group = blockIdx.x / a.slices % a.groups;
  const int64_t p = blockIdx.x / a.slices / a.groups;
  const int lane = threadIdx.x % Lanes::lanes, team = group * kTeams + threadIdx.x / Lanes::lanes;
  const int teams = a.groups * kTeams;
  const int64_t column0 = a.begin + slice * kSlice;
  const int columns = min(kSlice, a.columns - slice * kSlice);
  T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column0;
  const SlotLists lists{a.slots + p * a.slots_stride, a.starts + p * a.starts_stride, a.order + p * a.order_stride,
                        a.most, a.entries, a.num_slots};
  const float* carry = a.carry + p * a.carry_stride;
  const float* decay = a.decay + p * a.slots_stride;

  int slot[kInFlight];
  const auto look_up = [&](int i0) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) slot[k] = lists.slot(i0 + k * teams);
  };
  look_up(team);
  wait_for_previous();
  stage_slice<V>(staged, a.delta + p * a.delta_stride + column0, a.width, a.tokens, columns, [](int, auto&) {});
  __syncthreads();
  for (int i0 = team; i0 < a.most; i0 += kInFlight * teams) {
    if (i0 > team) look_up(i0);
    if (slot[0] < 0) break;
    Packed<T, V> packed[kInFlight][Lanes::steps];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        if (slot[k] >= 0 && c < columns) packed[k][s] = load_packed<T, V>(bank + slot[k] * a.width + c);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (slot[k] < 0) continue;
      const int i = i0 + k * teams;
      const int begin = lists.begin(i), end = lists.end(i);
      const float kept = decay[i];
      float row[Lanes::steps][V];
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        if (c >= columns) packed[k][s] = {};
        unpack<T, V>(packed[k][s], row[s]);
        if constexpr (S != Save::none) {
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
        for (int j = 0; j < V; ++j) row[s][j] *= kept;
      }
      for (int e = begin; e < end; ++e) {
        const int position = lists.position(e);
        if (position < 0) continue;
        const float weight = carry[position];
        const float* from = staged + a.by_writes(position) * kSlice;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          float d[V];
          load_staged<V>(from, lane, s, d);
#pragma unroll
          for (int j = 0; j < V; ++j) row[s][j] += weight * d[j];
        }
      }
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        if (c < columns) store<T, V>(bank + slot[k] * a.width + c, row[s]);
      }
    }
  }
  let_next_start();
}

}  // namespace

cudaError_t mover(const Forward& f, int64_t n, Columns columns, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  Params a = {f.bank,
              f.chunks.slots + c.stored_chunk * s.write_slots,
              f.chunks.starts + c.stored_chunk * (s.write_slots + 1),
              f.chunks.order + c.stored_chunk * s.chunk * s.writes,
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
              columns.begin,
              static_cast<int>(columns.end - columns.begin),
              0,
              0,
              c.tokens,
              static_cast<int>(s.writes),
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
    const int64_t per_pass = kThreads / SliceLanes<V>::lanes * kInFlight;
    a.groups = static_cast<int>(mover_groups(a.slices, s.streams, std::min<int64_t>(s.write_slots, a.entries), per_pass));
    return launch(kernel, dim3(a.slices * a.groups * s.streams), kThreads, sizeof(float) * c.tokens * kSlice, where, a);
  });
}

}  // namespace sdm::gpu
