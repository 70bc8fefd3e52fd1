// Movers of the backward, one launch for a chunk (section 4 of the specification). Blocks as in the
// mover, of two kinds:
// - written slots: restores the bank row from the snapshot, takes the dots of the slot and its entries, and
//   moves the gradient row back through the write, then through the chunk's reads of the slot;
// - slots that are only read: dots of the bank row with dY, and the gradient row plus what the reads give it.
// Moves a gradient row in and out, and a snapshot row in and a bank row out, or a bank row in. Bound by
// memory.
//
// Everything but du is on chip before the kernel that makes it has ended. Blocks of the second kind do not
// wait for it at all: nothing between reads or writes their rows.
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
constexpr int kHeld = 2;  // rows of each kind that a team of lanes holds at once
constexpr unsigned kAll = 0xffffffffu;

// One kind of slot and what its entries need.
struct Side {
  const int32_t *slots, *starts, *order;  // of the chunk in stream 0
  const int4* records;                    // or null
  const float* weights;                   // k_eff, q_eff
  int64_t slots_stride, starts_stride, order_stride, weights_stride, entry_stride, part_entries;
  int most, entries, groups;
  Divider by_entries;

  __device__ SlotLists lists(int64_t p, int num_slots) const {
    return {slots + p * slots_stride, starts + p * starts_stride, order + p * order_stride, most, entries, num_slots};
  }
};

struct Params {
  void *bank, *d_bank;
  Side write, read;
  const float *decay, *delta, *du, *beta;
  const int32_t* written;
  const void* dy;
  const void* snapshot;
  const float* scale;
  float *dk_eff, *dk_carry, *ddecay, *dq_eff;
  int64_t width, bank_stride, token_stride, beta_stride, written_stride, row_bytes, part_slots;
  int64_t first_stream;
  int streams, first_part, parts, part_slices, passes, tokens, streams_per_bank, num_slots;
  bool staged;
};

// What a block works on.
template <int V>
struct Place {
  using Lanes = SliceLanes<V>;
  static constexpr int kTeams = kThreads / Lanes::lanes;
  static constexpr int kSlots = kTeams * kHeld;
  int part, group, lane, team;
  int64_t p, bank_base;
};

template <class T, class G, int V, Quant Q>
__device__ inline void move_written(const Params& a, const Place<V>& at, float* staged) {
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = Place<V>::kTeams, kSlots = Place<V>::kSlots;
  const int64_t p = at.p;
  const Side& side = a.write;
  const SlotLists lists = side.lists(p, a.num_slots), reads = a.read.lists(p, a.num_slots);
  const int4* records = side.records == nullptr ? nullptr : side.records + p * side.slots_stride;
  const float* decay = a.decay + p * side.slots_stride;
  const float* k_eff = side.weights + p * side.weights_stride;
  const float* q_eff = a.read.weights + p * a.read.weights_stride;
  float* dk_eff = a.dk_eff + at.part * side.part_entries + p * side.entry_stride;
  float* dk_carry = a.dk_carry + at.part * side.part_entries + p * side.entry_stride;
  float* dq_eff = a.dq_eff + at.part * a.read.part_entries + p * a.read.entry_stride;
  float* ddecay = a.ddecay + at.part * a.part_slots + p * side.slots_stride;
  const float* beta = a.beta + p * a.beta_stride;
  const int32_t* written = a.written + p * a.written_stride;
  const uint8_t* snapshot = static_cast<const uint8_t*>(a.snapshot) + p * side.slots_stride * a.row_bytes;
  const float* scale = a.scale + p * side.slots_stride;
  float* staged_delta = staged + a.tokens * kSlice;
  const int first = at.group * a.passes * kSlots + at.team;  // of the block, and of this team

  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(at.part) * a.part_slices + sl) * kSlice;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(kSlice), a.width - column0));
    T* bank = static_cast<T*>(a.bank) + at.bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + at.bank_base + column0;
    const T* dy = static_cast<const T*>(a.dy) + p * a.token_stride + column0;
    const float* du_rows = a.du + p * a.token_stride + column0;
    const float* delta_rows = a.delta + p * a.token_stride + column0;
    // du is scaled by -beta; or it comes as dv = beta du.
    const auto factor = [&](int t) { return a.beta == nullptr ? -1.0f : written[t] > 0 ? -beta[t] : 0.0f; };
    int next[kHeld];
    const auto look_up = [&](int pass) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) next[k] = lists.slot(first + (pass * kHeld + k) * kTeams);
    };
    look_up(0);
    for (int pass = 0; pass < a.passes; ++pass) {
      int slots[kHeld];
      SlotRecord record[kHeld];
      Packed<T, V> rows[kHeld][Lanes::steps];
      Packed<G, V> grads[kHeld][Lanes::steps];
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int i = first + (pass * kHeld + k) * kTeams, slot = slots[k] = next[k];
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(at.lane, s);
          rows[k][s] = {};
          grads[k][s] = {};
          if (slot >= 0 && c < columns) {
            grads[k][s] = load_row<G, V>(d_bank + slot * a.width + c);
            const float row_scale = Q == Quant::fp8 || Q == Quant::int4 ? scale[i] : 0.0f;
            rows[k][s] = restore<T, V, Q>(snapshot + i * a.row_bytes, row_scale, column0 + c);
          }
        }
        record[k] = record_of(records, lists, i, decay, k_eff);
      }
      if (pass + 1 < a.passes) look_up(pass + 1);
      if (pass == 0) {
        if (sl > 0) __syncthreads();
        if (a.staged) stage_slice<V>(staged_delta, delta_rows, a.width, a.tokens, columns, [](int, auto&) {});
        if (sl == 0) wait_for_previous();
        if (a.staged) {
          stage_slice<V>(staged, du_rows, a.width, a.tokens, columns, [&](int t, auto& x) {
            const float f = factor(t);
            for (float& y : x) y *= f;
          });
        }
        __syncthreads();
      }
      if (!__any_sync(kAll, slots[0] >= 0)) break;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int i = first + (pass * kHeld + k) * kTeams, slot = slots[k];
        const bool on = slot >= 0;
        if (!__any_sync(kAll, on)) break;
        float row[Lanes::steps][V], grad[Lanes::steps][V], moved[Lanes::steps][V];
        float dot = 0;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(at.lane, s);
          if (on && c < columns) store_packed<T, V>(bank + slot * a.width + c, rows[k][s]);
          unpack<T, V>(rows[k][s], row[s]);
          unpack<G, V>(grads[k][s], grad[s]);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dot += grad[s][j] * row[s][j];
            moved[s][j] = record[k].decay() * grad[s][j];
          }
        }
        dot = group_sum<Lanes::lanes>(dot) * record[k].decay();
        if (on && at.lane == 0) ddecay[i] = sl > 0 ? ddecay[i] + dot : dot;
        // By the whole warp: `position` is -1 for a team that has no such entry.
        const auto entry = [&](int position, float weight) {
          const int t = position < 0 ? 0 : side.by_entries(position);
          float eff = 0, carry = 0;
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
            const int c = Lanes::column(at.lane, s);
            float dret[V] = {}, delta[V] = {};
            if (a.staged) {
              load_staged<V>(staged + t * kSlice, at.lane, s, dret);
              load_staged<V>(staged_delta + t * kSlice, at.lane, s, delta);
            } else if (position >= 0 && c < columns) {
              const float f = factor(t);
              load<float, V>(du_rows + t * a.width + c, dret);
              load<float, V>(delta_rows + t * a.width + c, delta);
#pragma unroll
              for (int j = 0; j < V; ++j) dret[j] *= f;
            }
#pragma unroll
            for (int j = 0; j < V; ++j) {
              eff += dret[j] * row[s][j];
              carry += delta[j] * grad[s][j];
              if (position >= 0) moved[s][j] += weight * dret[j];
            }
          }
          eff = group_sum<Lanes::lanes>(eff);
          carry = group_sum<Lanes::lanes>(carry);
          if (position >= 0 && at.lane == 0) {
            dk_eff[position] = sl > 0 ? dk_eff[position] + eff : eff;
            dk_carry[position] = sl > 0 ? dk_carry[position] + carry : carry;
          }
        };
        const bool single = record[k].single();
        entry(on && single ? record[k].position() : -1, record[k].weight());
        if (__any_sync(kAll, on && !single)) {
          int e = on && !single ? lists.begin(i) : 0;
          const int end = on && !single ? lists.end(i) : 0;
          for (; __any_sync(kAll, e < end); ++e) {
            const int position = e < end ? lists.position(e) : -1;
            entry(position, position < 0 ? 0.0f : k_eff[position]);
          }
        }
        // The chunk's reads of the slot.
        if (__any_sync(kAll, on && record[k].linked())) {
          const int link = on && record[k].linked() ? reads.find(slot) : -1;
          int f = link >= 0 ? reads.begin(link) : 0;
          const int last = link >= 0 ? reads.end(link) : 0;
          for (; __any_sync(kAll, f < last); ++f) {
            const int position = f < last ? reads.position(f) : -1;
            const int t = position < 0 ? 0 : a.read.by_entries(position);
            const float weight = position < 0 ? 0.0f : q_eff[position];
            float sum = 0;
#pragma unroll
            for (int s = 0; s < Lanes::steps; ++s) {
              const int c = Lanes::column(at.lane, s);
              float y[V] = {};
              if (position >= 0 && c < columns) load<T, V>(dy + t * a.width + c, y);
#pragma unroll
              for (int j = 0; j < V; ++j) {
                sum += y[j] * row[s][j];
                if (position >= 0) moved[s][j] += weight * y[j];
              }
            }
            sum = group_sum<Lanes::lanes>(sum);
            if (position >= 0 && at.lane == 0) dq_eff[position] = sl > 0 ? dq_eff[position] + sum : sum;
          }
        }
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(at.lane, s);
          if (on && c < columns) store<G, V>(d_bank + slot * a.width + c, moved[s]);
        }
      }
    }
  }
}

template <class T, class G, int V>
__device__ inline void move_read(const Params& a, const Place<V>& at, float* staged) {
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = Place<V>::kTeams, kSlots = Place<V>::kSlots;
  const int64_t p = at.p;
  const Side& side = a.read;
  const SlotLists lists = side.lists(p, a.num_slots);
  const int4* records = side.records == nullptr ? nullptr : side.records + p * side.slots_stride;
  const float* q_eff = side.weights + p * side.weights_stride;
  float* dq_eff = a.dq_eff + at.part * side.part_entries + p * side.entry_stride;
  const int first = at.group * a.passes * kSlots + at.team;
  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(at.part) * a.part_slices + sl) * kSlice;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(kSlice), a.width - column0));
    const T* bank = static_cast<const T*>(a.bank) + at.bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + at.bank_base + column0;
    const T* dy_rows = static_cast<const T*>(a.dy) + p * a.token_stride + column0;
    int next[kHeld];
    const auto look_up = [&](int pass) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k) next[k] = lists.slot(first + (pass * kHeld + k) * kTeams);
    };
    look_up(0);
    for (int pass = 0; pass < a.passes; ++pass) {
      int slots[kHeld];
      SlotRecord record[kHeld];
      Packed<T, V> rows[kHeld][Lanes::steps];
      Packed<G, V> grads[kHeld][Lanes::steps];
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const int slot = slots[k] = next[k];
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(at.lane, s);
          rows[k][s] = {};
          grads[k][s] = {};
          // Rows of slots that are written too are read in vain.
          if (slot >= 0 && c < columns) {
            grads[k][s] = load_row<G, V>(d_bank + slot * a.width + c);
            rows[k][s] = load_row<T, V>(bank + slot * a.width + c);
          }
        }
        record[k] = record_of(records, lists, first + (pass * kHeld + k) * kTeams, nullptr, q_eff);
      }
      if (pass + 1 < a.passes) look_up(pass + 1);
      if (pass == 0 && a.staged) {
        if (sl > 0) __syncthreads();
        stage_slice<V>(staged, dy_rows, a.width, a.tokens, columns, [](int, auto&) {});
        __syncthreads();
      }
      if (!__any_sync(kAll, slots[0] >= 0)) break;
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const bool on = slots[k] >= 0 && !record[k].linked();
        if (!__any_sync(kAll, on)) continue;
        const int i = first + (pass * kHeld + k) * kTeams;
        float row[Lanes::steps][V], grad[Lanes::steps][V];
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          unpack<T, V>(rows[k][s], row[s]);
          unpack<G, V>(grads[k][s], grad[s]);
        }
        const auto entry = [&](int position, float weight) {
          const int t = position < 0 ? 0 : side.by_entries(position);
          float dot = 0;
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
            const int c = Lanes::column(at.lane, s);
            float dy[V] = {};
            if (a.staged) {
              load_staged<V>(staged + t * kSlice, at.lane, s, dy);
            } else if (position >= 0 && c < columns) {
              load<T, V>(dy_rows + t * a.width + c, dy);
            }
#pragma unroll
            for (int j = 0; j < V; ++j) {
              dot += dy[j] * row[s][j];
              if (position >= 0) grad[s][j] += weight * dy[j];
            }
          }
          dot = group_sum<Lanes::lanes>(dot);
          if (position >= 0 && at.lane == 0) dq_eff[position] = sl > 0 ? dq_eff[position] + dot : dot;
        };
        const bool single = record[k].single();
        entry(on && single ? record[k].position() : -1, record[k].weight());
        if (__any_sync(kAll, on && !single)) {
          int e = on && !single ? lists.begin(i) : 0;
          const int end = on && !single ? lists.end(i) : 0;
          for (; __any_sync(kAll, e < end); ++e) {
            const int position = e < end ? lists.position(e) : -1;
            entry(position, position < 0 ? 0.0f : q_eff[position]);
          }
        }
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          const int c = Lanes::column(at.lane, s);
          if (on && c < columns) store<G, V>(d_bank + slots[k] * a.width + c, grad[s]);
        }
      }
    }
  }
}

template <class T, class G, int V, Quant Q>
__global__ void __launch_bounds__(kThreads, 3) gradient_mover_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) float staged[];  // dret, delta: [2][C][64]; or dY: [C][64]
  using Lanes = SliceLanes<V>;
  Place<V> at;
  // Slots that are only read come first: they have nothing to wait for.
  const int read_blocks = a.streams * a.read.groups * a.parts;
  const bool reads = static_cast<int>(blockIdx.x) < read_blocks;
  const int block = reads ? blockIdx.x : blockIdx.x - read_blocks, groups = reads ? a.read.groups : a.write.groups;
  at.part = a.first_part + block % a.parts;
  at.group = block / a.parts % groups;
  at.p = a.first_stream + block / a.parts / groups;
  at.lane = threadIdx.x % Lanes::lanes;
  at.team = threadIdx.x / Lanes::lanes;
  at.bank_base = at.p / a.streams_per_bank * a.bank_stride;
  if (reads) {
    move_read<T, G, V>(a, at, staged);
  } else {
    move_written<T, G, V, Q>(a, at, staged);
  }
  let_next_start();
}

template <class T, class G, int V>
auto kernel_for(Quant quant) {
  switch (quant) {
    case Quant::none:
      return gradient_mover_kernel<T, G, V, Quant::none>;
    case Quant::bf16:
      return gradient_mover_kernel < T, G, V, std::is_same_v<T, bf16> ? Quant::none : Quant::bf16 > ;
    case Quant::fp8:
      return gradient_mover_kernel<T, G, V, Quant::fp8>;
    case Quant::int4:
      break;
  }
  return gradient_mover_kernel<T, G, V, Quant::int4>;
}

cudaError_t move(const Backward& b, int64_t n, Range range, bool write, bool read, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  const int64_t element = b.dtype == DType::bf16 ? 2 : 4, first = c.stored_chunk * s.write_slots;
  const bool linked = write && read;
  Params a = {};
  a.bank = b.bank;
  a.d_bank = b.d_bank;
  const auto side = [&](const int32_t* slots, const int32_t* starts, const int32_t* order, const void* records,
                        const void* weights, int64_t most, int64_t entries) {
    Side x = {};
    x.slots = slots + c.stored_chunk * most;
    x.starts = starts + c.stored_chunk * (most + 1);
    x.order = order + c.stored_chunk * s.chunk * entries;
    x.records = linked ? static_cast<const int4*>(records) + c.stored_chunk * most : nullptr;
    x.weights = at<float>(weights, c.stored_token * entries);
    x.slots_stride = s.stored_chunks * most;
    x.starts_stride = s.stored_chunks * (most + 1);
    x.order_stride = s.stored_chunks * s.chunk * entries;
    x.weights_stride = s.stored_tokens * entries;
    x.entry_stride = s.tokens * entries;
    x.part_entries = s.streams * s.tokens * entries;
    x.most = static_cast<int>(most);
    x.entries = c.tokens * static_cast<int>(entries);
    x.by_entries = Divider(entries);
    return x;
  };
  const Chunks& k = b.chunks;
  if (write) a.write = side(k.slots, k.starts, k.order, b.write_records, k.k_eff, s.write_slots, s.writes);
  if (read) a.read = side(k.read_slots, k.read_starts, k.read_order, b.read_records, k.q_eff, s.read_slots, s.reads);
  a.decay = at<float>(k.decay, first);
  a.delta = at<float>(b.delta, c.token * s.width);
  a.du = at<float>(b.dv, c.token * s.width);
  a.beta = at<float>(b.in.beta, c.token);
  a.written = k.writes == nullptr ? nullptr : k.writes + c.stored_token;
  a.dy = b.dtype == DType::bf16 ? static_cast<const void*>(at<bf16>(b.dy, c.token * s.width))
                                : static_cast<const void*>(at<float>(b.dy, c.token * s.width));
  a.row_bytes = snapshot_row_bytes(b.quant, element, s.width);
  a.snapshot = at<char>(b.snapshot, first * a.row_bytes);
  a.scale = b.scale == nullptr ? nullptr : b.scale + first;
  a.dk_eff = at<float>(b.dk_eff, c.token * s.writes);
  a.dk_carry = at<float>(b.dk_carry, c.token * s.writes);
  a.ddecay = at<float>(b.ddecay, first);
  a.dq_eff = at<float>(b.dq_eff, c.token * s.reads);
  a.width = s.width;
  a.bank_stride = s.slots * s.width;
  a.token_stride = s.tokens * s.width;
  a.beta_stride = s.tokens;
  a.written_stride = s.stored_tokens;
  a.part_slots = s.streams * s.stored_chunks * s.write_slots;
  a.part_slices = static_cast<int>(part_slices(s, b.parts));
  a.first_part = static_cast<int>(range.begin / (kSlice * a.part_slices));
  a.first_stream = range.first_stream;
  a.streams = static_cast<int>(range.streams);
  a.parts = static_cast<int>(div_up(range.end - range.begin, kSlice * a.part_slices));
  a.passes = mover_passes(s.chunk, kHeld);
  a.staged = stages_gradients(s.chunk);
  a.tokens = c.tokens;
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  const auto run = [&](auto type, auto grad, auto v) {
    using T = decltype(type);
    using G = decltype(grad);
    constexpr int V = decltype(v)::value;
    for (Side* x : {&a.write, &a.read}) {
      x->groups = static_cast<int>(div_up(std::min<int64_t>(x->most, x->entries), Place<V>::kSlots * a.passes));
    }
    return launch(kernel_for<T, G, V>(b.quant), dim3(a.parts * (a.write.groups + a.read.groups) * range.streams),
                  kThreads, a.staged ? (write ? 2 : 1) * sizeof(float) * c.tokens * kSlice : 0, where, a);
  };
  return for_rows(b.dtype, s.width, [&](auto type, auto v) {
    if (b.dtype == b.grad_dtype) return run(type, type, v);
    return run(type, float{}, v);
  });
}

}  // namespace

cudaError_t write_mover(const Backward& b, int64_t n, Range range, Launch where) {
  return move(b, n, range, true, false, where);
}

cudaError_t read_mover(const Backward& b, int64_t n, Range range, Launch where) {
  return move(b, n, range, false, true, where);
}

cudaError_t gradient_mover(const Backward& b, int64_t n, Range range, Launch where) {
  return move(b, n, range, true, true, where);
}

}  // namespace sdm::gpu
