// Read mover of the backward: dots of the restored rows with the tokens' dY, and their gradient rows
// plus what the reads give them (section 4 of the specification). Blocks and parts as in the write
// mover; dY of the slice lies in shared memory. Moves the bank row in and the gradient row in and out;
// bound by memory.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 2;

struct Params {
  const void* bank;
  void* d_bank;
  const int32_t *slots, *starts, *order;
  const float* q_eff;
  const void* dy;
  float* dq_eff;
  int64_t width, bank_stride, slots_stride, starts_stride, order_stride, stored_entry_stride, entry_stride, token_stride,
      part_entries;
  int first_part, parts, part_slices, groups, tokens, most, entries, streams_per_bank, num_slots;
  Divider by_reads;
};

template <class T, class G, int V>
__global__ void __launch_bounds__(kThreads) read_mover_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) float staged[];  // dY: [C][64]
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
  const float* q_eff = a.q_eff + p * a.stored_entry_stride;
  float* dq_eff = a.dq_eff + part * a.part_entries + p * a.entry_stride;

  int slot[kInFlight];
  const auto look_up = [&](int i0) {
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) slot[k] = lists.slot(i0 + k * teams);
  };
  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(part) * a.part_slices + sl) * kSlice;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(kSlice), a.width - column0));
    const T* bank = static_cast<const T*>(a.bank) + bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + bank_base + column0;
    if (sl > 0) __syncthreads();
    // dY does not depend on the step before.
    stage_slice<V>(staged, static_cast<const T*>(a.dy) + p * a.token_stride + column0, a.width, a.tokens, columns,
                   [](int, auto&) {});
    if (sl == 0) wait_for_previous();
    __syncthreads();
    for (int i0 = team;; i0 += kInFlight * teams) {
      look_up(i0);
      if (!__any_sync(kAll, slot[0] >= 0)) break;
      Packed<T, V> rows[kInFlight][Lanes::steps];
      Packed<G, V> grads[kInFlight][Lanes::steps];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(lane, s);
          rows[k][s] = {};
          grads[k][s] = {};
          if (slot[k] >= 0 && c < columns) {
            grads[k][s] = load_packed<G, V>(d_bank + slot[k] * a.width + c);
            rows[k][s] = load_packed<T, V>(bank + slot[k] * a.width + c);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int i = i0 + k * teams;
        const bool on = slot[k] >= 0;
        if (!__any_sync(kAll, on)) continue;
        float row[Lanes::steps][V], grad[Lanes::steps][V];
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          unpack<T, V>(rows[k][s], row[s]);
          unpack<G, V>(grads[k][s], grad[s]);
        }
        int e = on ? lists.begin(i) : 0;
        const int end = on ? lists.end(i) : 0;
        while (__any_sync(kAll, e < end)) {
          const int position = e < end ? lists.position(e) : -1;
          ++e;
          const int t = position < 0 ? 0 : a.by_reads(position);
          const float weight = position < 0 ? 0.0f : q_eff[position];
          float dot = 0;
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
            float dy[V];
            load_staged<V>(staged + t * kSlice, lane, s, dy);
#pragma unroll
            for (int j = 0; j < V; ++j) {
              dot += dy[j] * row[s][j];
              if (position >= 0) grad[s][j] += weight * dy[j];
            }
          }
          dot = group_sum<Lanes::lanes>(dot);
          if (position >= 0 && lane == 0) dq_eff[position] = sl > 0 ? dq_eff[position] + dot : dot;
        }
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(lane, s);
          if (on && c < columns) store<G, V>(d_bank + slot[k] * a.width + c, grad[s]);
        }
      }
    }
  }
  let_next_start();
}

}  // namespace

cudaError_t read_mover(const Backward& b, int64_t n, Columns columns, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  Params a = {};
  a.bank = b.bank;
  a.d_bank = b.d_bank;
  a.slots = b.chunks.read_slots + c.stored_chunk * s.read_slots;
  a.starts = b.chunks.read_starts + c.stored_chunk * (s.read_slots + 1);
  a.order = b.chunks.read_order + c.stored_chunk * s.chunk * s.reads;
  a.q_eff = at<float>(b.chunks.q_eff, c.stored_token * s.reads);
  a.dy = b.dtype == DType::bf16 ? static_cast<const void*>(at<bf16>(b.dy, c.token * s.width))
                                : static_cast<const void*>(at<float>(b.dy, c.token * s.width));
  a.dq_eff = at<float>(b.dq_eff, c.token * s.reads);
  a.width = s.width;
  a.bank_stride = s.slots * s.width;
  a.slots_stride = s.stored_chunks * s.read_slots;
  a.starts_stride = s.stored_chunks * (s.read_slots + 1);
  a.order_stride = s.stored_chunks * s.chunk * s.reads;
  a.stored_entry_stride = s.stored_tokens * s.reads;
  a.entry_stride = s.tokens * s.reads;
  a.token_stride = s.tokens * s.width;
  a.part_entries = s.streams * s.tokens * s.reads;
  a.part_slices = static_cast<int>(part_slices(s, b.parts));
  a.first_part = static_cast<int>(columns.begin / (kSlice * a.part_slices));
  a.parts = static_cast<int>(div_up(columns.end - columns.begin, kSlice * a.part_slices));
  a.tokens = c.tokens;
  a.most = static_cast<int>(s.read_slots);
  a.entries = c.tokens * static_cast<int>(s.reads);
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  a.by_reads = Divider(s.reads);
  const auto run = [&](auto type, auto grad, auto v) {
    using T = decltype(type);
    using G = decltype(grad);
    constexpr int V = decltype(v)::value;
    const int64_t per_pass = kThreads / SliceLanes<V>::lanes * kInFlight;
    a.groups = static_cast<int>(mover_groups(a.parts, s.streams, std::min<int64_t>(a.most, a.entries), per_pass));
    return launch(read_mover_kernel<T, G, V>, dim3(a.parts * a.groups * s.streams), kThreads,
                  sizeof(float) * c.tokens * kSlice, where, a);
  };
  return for_rows(b.dtype, s.width, [&](auto type, auto v) {
    if (b.dtype == b.grad_dtype) return run(type, type, v);
    return run(type, float{}, v);
  });
}

}  // namespace sdm::gpu
