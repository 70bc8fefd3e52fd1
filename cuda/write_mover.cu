// Write mover of the backward: restores the rows that a chunk wrote from the snapshot, takes the dots of
// its entries and slots, and moves their gradient rows back through the write (section 4 of the
// specification). Blocks as in the mover; dret and delta of the slice lie in shared memory. Moves the
// gradient row in and out, the snapshot row in and the bank row out; bound by memory.
//
// A block takes the slices of one column part one after another, and adds up the dots of its part in
// their order.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 2;

struct Params {
  void *bank, *d_bank;
  const int32_t *slots, *starts, *order;
  const float *decay, *k_eff, *delta, *du, *beta;
  const int32_t* written;
  const void* snapshot;
  const float* scale;
  float *dk_eff, *dk_carry, *ddecay;
  int64_t width, bank_stride, slots_stride, starts_stride, order_stride, stored_entry_stride, entry_stride, token_stride,
      beta_stride, written_stride, row_bytes, part_entries, part_slots;
  int first_part, parts, part_slices, groups, tokens, most, entries, streams_per_bank, num_slots;
  Divider by_writes;
};

template <class T, class G, int V, Quant Q>
__global__ void __launch_bounds__(kThreads) write_mover_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) float staged[];  // dret, delta: [2][C][64]
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = kThreads / Lanes::lanes;
  constexpr unsigned kAll = 0xffffffffu;
  const int part = a.first_part + blockIdx.x % a.parts, group = blockIdx.x / a.parts % a.groups;
  const int64_t p = blockIdx.x / a.parts / a.groups;
  const int lane = threadIdx.x % Lanes::lanes, team = group * kTeams + threadIdx.x / Lanes::lanes;
  const int teams = a.groups * kTeams;
  const int64_t bank_base = p / a.streams_per_bank * a.bank_stride;
  const SlotLists lists{a.slots + p * a.slots_stride, a.starts + p * a.starts_stride, a.order + p * a.order_stride,
                        a.most, a.entries, a.num_slots};
  const float* decay = a.decay + p * a.slots_stride;
  const float* k_eff = a.k_eff + p * a.stored_entry_stride;
  float* dk_eff = a.dk_eff + part * a.part_entries + p * a.entry_stride;
  float* dk_carry = a.dk_carry + part * a.part_entries + p * a.entry_stride;
  float* ddecay = a.ddecay + part * a.part_slots + p * a.slots_stride;
  const float* beta = a.beta + p * a.beta_stride;
  const int32_t* written = a.written + p * a.written_stride;
  const uint8_t* snapshot = static_cast<const uint8_t*>(a.snapshot) + p * a.slots_stride * a.row_bytes;
  const float* scale = a.scale + p * a.slots_stride;
  float* staged_delta = staged + a.tokens * kSlice;

  int slot[kInFlight];
  const auto look_up = [&](int i0) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) slot[k] = lists.slot(i0 + k * teams);
  };
  look_up(team);
  wait_for_previous();
  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(part) * a.part_slices + sl) * kSlice;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(kSlice), a.width - column0));
    T* bank = static_cast<T*>(a.bank) + bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + bank_base + column0;
    if (sl > 0) __syncthreads();
    stage_slice<V>(staged, a.du + p * a.token_stride + column0, a.width, a.tokens, columns, [&](int t, auto& x) {
      // Given by beta and du, or as dv = beta du.
      const float factor = a.beta == nullptr ? -1.0f : written[t] > 0 ? -beta[t] : 0.0f;
      for (float& y : x) y *= factor;
    });
    stage_slice<V>(staged_delta, a.delta + p * a.token_stride + column0, a.width, a.tokens, columns, [](int, auto&) {});
    __syncthreads();
    for (int i0 = team;; i0 += kInFlight * teams) {
      if (sl > 0 || i0 > team) look_up(i0);
      if (!__any_sync(kAll, slot[0] >= 0)) break;
      Packed<T, V> rows[kInFlight][Lanes::steps];
      Packed<G, V> grads[kInFlight][Lanes::steps];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int i = i0 + k * teams;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(lane, s);
          rows[k][s] = {};
          grads[k][s] = {};
          if (slot[k] >= 0 && c < columns) {
            grads[k][s] = load_packed<G, V>(d_bank + slot[k] * a.width + c);
            const float row_scale = Q == Quant::fp8 || Q == Quant::int4 ? scale[i] : 0.0f;
            rows[k][s] = restore<T, V, Q>(snapshot + i * a.row_bytes, row_scale, column0 + c);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int i = i0 + k * teams;
        const bool on = slot[k] >= 0;
        if (!__any_sync(kAll, on)) continue;
        float row[Lanes::steps][V], grad[Lanes::steps][V], moved[Lanes::steps][V];
        const float kept = on ? decay[i] : 0.0f;
        float dot = 0;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(lane, s);
          if (on && c < columns) store_packed<T, V>(bank + slot[k] * a.width + c, rows[k][s]);
          unpack<T, V>(rows[k][s], row[s]);
          unpack<G, V>(grads[k][s], grad[s]);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dot += grad[s][j] * row[s][j];
            moved[s][j] = kept * grad[s][j];
          }
        }
        dot = group_sum<Lanes::lanes>(dot) * kept;
        if (on && lane == 0) ddecay[i] = sl > 0 ? ddecay[i] + dot : dot;
        int e = on ? lists.begin(i) : 0;
        const int end = on ? lists.end(i) : 0;
        while (__any_sync(kAll, e < end)) {
          const int position = e < end ? lists.position(e) : -1;
          ++e;
          const int t = position < 0 ? 0 : a.by_writes(position);
          const float weight = position < 0 ? 0.0f : k_eff[position];
          float eff = 0, carry = 0;
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
            float dret[V], delta[V];
            load_staged<V>(staged + t * kSlice, lane, s, dret);
            load_staged<V>(staged_delta + t * kSlice, lane, s, delta);
#pragma unroll
            for (int j = 0; j < V; ++j) {
              eff += dret[j] * row[s][j];
              carry += delta[j] * grad[s][j];
              if (position >= 0) moved[s][j] += weight * dret[j];
            }
          }
          eff = group_sum<Lanes::lanes>(eff);
          carry = group_sum<Lanes::lanes>(carry);
          if (position >= 0 && lane == 0) {
            dk_eff[position] = sl > 0 ? dk_eff[position] + eff : eff;
            dk_carry[position] = sl > 0 ? dk_carry[position] + carry : carry;
          }
        }
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(lane, s);
          if (on && c < columns) store<G, V>(d_bank + slot[k] * a.width + c, moved[s]);
        }
      }
    }
  }
  let_next_start();
}

template <class T, class G, int V>
auto kernel_for(Quant quant) {
  switch (quant) {
    case Quant::none: return write_mover_kernel<T, G, V, Quant::none>;
    case Quant::bf16: return write_mover_kernel<T, G, V, std::is_same_v<T, bf16> ? Quant::none : Quant::bf16>;
    case Quant::fp8: return write_mover_kernel<T, G, V, Quant::fp8>;
    case Quant::int4: break;
  }
  return write_mover_kernel<T, G, V, Quant::int4>;
}

}  // namespace

cudaError_t write_mover(const Backward& b, int64_t n, Columns columns, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  const int64_t element = b.dtype == DType::bf16 ? 2 : 4, first = c.stored_chunk * s.write_slots;
  Params a = {};
  a.bank = b.bank;
  a.d_bank = b.d_bank;
  a.slots = b.chunks.slots + first;
  a.starts = b.chunks.starts + c.stored_chunk * (s.write_slots + 1);
  a.order = b.chunks.order + c.stored_chunk * s.chunk * s.writes;
  a.decay = at<float>(b.chunks.decay, first);
  a.k_eff = at<float>(b.chunks.k_eff, c.stored_token * s.writes);
  a.delta = at<float>(b.delta, c.token * s.width);
  a.du = at<float>(b.dv, c.token * s.width);
  a.beta = at<float>(b.in.beta, c.token);
  a.written = b.chunks.writes == nullptr ? nullptr : b.chunks.writes + c.stored_token;
  a.row_bytes = snapshot_row_bytes(b.quant, element, s.width);
  a.snapshot = at<char>(b.snapshot, first * a.row_bytes);
  a.scale = b.scale == nullptr ? nullptr : b.scale + first;
  a.dk_eff = at<float>(b.dk_eff, c.token * s.writes);
  a.dk_carry = at<float>(b.dk_carry, c.token * s.writes);
  a.ddecay = at<float>(b.ddecay, first);
  a.width = s.width;
  a.bank_stride = s.slots * s.width;
  a.slots_stride = s.stored_chunks * s.write_slots;
  a.starts_stride = s.stored_chunks * (s.write_slots + 1);
  a.order_stride = s.stored_chunks * s.chunk * s.writes;
  a.stored_entry_stride = s.stored_tokens * s.writes;
  a.entry_stride = s.tokens * s.writes;
  a.token_stride = s.tokens * s.width;
  a.beta_stride = s.tokens;
  a.written_stride = s.stored_tokens;
  a.part_entries = s.streams * s.tokens * s.writes;
  a.part_slots = s.streams * s.stored_chunks * s.write_slots;
  a.part_slices = static_cast<int>(part_slices(s, b.parts));
  a.first_part = static_cast<int>(columns.begin / (kSlice * a.part_slices));
  a.parts = static_cast<int>(div_up(columns.end - columns.begin, kSlice * a.part_slices));
  a.tokens = c.tokens;
  a.most = static_cast<int>(s.write_slots);
  a.entries = c.tokens * static_cast<int>(s.writes);
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  a.by_writes = Divider(s.writes);
  const auto run = [&](auto type, auto grad, auto v) {
    using T = decltype(type);
    using G = decltype(grad);
    constexpr int V = decltype(v)::value;
    const int64_t per_pass = kThreads / SliceLanes<V>::lanes * kInFlight;
    a.groups = static_cast<int>(mover_groups(a.parts, s.streams, std::min<int64_t>(a.most, a.entries), per_pass));
    return launch(kernel_for<T, G, V>(b.quant), dim3(a.parts * a.groups * s.streams), kThreads,
                  2 * sizeof(float) * c.tokens * kSlice, where, a);
  };
  return for_rows(b.dtype, s.width, [&](auto type, auto v) {
    if (b.dtype == b.grad_dtype) return run(type, type, v);
    return run(type, float{}, v);
  });
}

}  // namespace sdm::gpu
