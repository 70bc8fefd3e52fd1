// Movers of the backward, one launch for a chunk (section 4 of the specification), in two kinds of blocks:
// - written slots: restores the bank row from the snapshot, takes the dots of the slot and its entries, and
//   moves the gradient row back through the write, then through the chunk's reads of the slot;
// - slots that are only read: dots of the bank row with dY, and the gradient row plus what the reads give it.
// A warp takes up to 32 entries of a token in a slice of columns: the slots that it names first, with the token's
// rows of dret and delta, or of dY, in registers. Moves a gradient row in and out, and a snapshot row in and a bank
// row out, or a bank row in. Bound by memory.
//
// The lists and the first rows are on chip before the kernel that makes du has ended. Blocks of the second kind do not
// wait for it at all: nothing between reads or writes their rows.
//
// A block takes the slices of one column part one after another, and adds up the dots of its part in
// their order.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"
#include "cuda/common/tensor.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 2;  // rows of each kind that a team of lanes works on at once
constexpr int kItems = WarpRecords::kItems;

// One kind of slot and what its entries need.
struct Side {
  const int32_t *slots, *starts, *order;  // of the chunk in stream 0
  const int4* records;                    // or null
  const float* weights;                   // k_eff, q_eff
  int64_t slots_stride, starts_stride, order_stride, weights_stride, entry_stride, part_entries;
  int most, entries, groups;
  int per_token, token_warps, items;  // entries of a token, the warps that share them, entries of a warp
  Divider by_entries;

  __device__ SlotRecords records_of(int64_t p, const float* decays, int num_slots) const {
    const SlotLists lists{
        slots + p * slots_stride, starts + p * starts_stride, order + p * order_stride, most, entries, num_slots};
    return {records == nullptr ? nullptr : records + p * order_stride, lists, weights + p * weights_stride, decays};
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
  int64_t width, bank_stride, token_stride, beta_stride, written_stride, part_slots;
  int64_t first_stream;
  int row_bytes;  // of the snapshot
  int streams, first_part, parts, part_slices, tokens, streams_per_bank, num_slots;
};

// What a warp works on.
template <int V, int Columns>
struct Place {
  using Lanes = SliceLanes<V, Columns>;
  static constexpr int kTeams = 32 / Lanes::lanes;
  int part, lane, team, index;
  int64_t p, bank_base;
  SlotRecord* shared;     // [WarpRecords::kRoom]
  unsigned char* stages;  // of its RowRounds

  // The token whose entries the warp takes; without records items are slots, and there is no token.
  __device__ int token(const Side& side) const { return index / side.token_warps; }
  __device__ WarpRecords records(const Side& side, const SlotRecords& all, bool linked) const {
    const int skipped = index % side.token_warps * side.items;
    return WarpRecords(all, shared, token(side) * side.per_token + skipped, min(side.items, side.per_token - skipped),
                       linked, kHeld * kTeams, kTeams);
  }
};

// The rows of a warp's slots on their way through shared memory, kDepth rounds ahead: a row of each kind for each team
// a round, first those of simple slots, in whole pairs of rounds, then the others. A lane copies its 16 bytes of a
// row, and reads only what it copied. Of rows of whole vectors; single values are loaded when they are needed.
template <class T, class G, int V, int Teams>
struct RowRounds {
  static constexpr int kPiece = 32 * 16;  // bytes of the lanes side by side
  static constexpr int kRowPieces = Packed<T, V>::kWords / 4, kGradPieces = Packed<G, V>::kWords / 4;
  static constexpr int kDepth = 4;
  static constexpr int kBytes = V > 1 ? kDepth * (kRowPieces + kGradPieces) * kPiece : 0;
  static_assert(kDepth % kHeld == 0);

  unsigned char* mine;
  const SlotRecord* records;
  int simple, all;  // rounds

  __device__ RowRounds(unsigned char* stages, const WarpRecords& records)
      : mine(stages + threadIdx.x % 32 * 16),
        records(records.shared),
        simple(records.others_begin / Teams),
        all(simple + (records.others + Teams - 1) / Teams) {}

  __device__ SlotRecord record(int round, int team) const { return records[round * Teams + team]; }
  __device__ unsigned char* stage(int round) const {
    return mine + round % kDepth * (kRowPieces + kGradPieces) * kPiece;
  }
  __device__ void copy_row(int round, const T* from) const { copy<kRowPieces>(stage(round), from); }
  __device__ void copy_grad(int round, const G* from) const {
    copy<kGradPieces>(stage(round) + kRowPieces * kPiece, from);
  }
  __device__ Packed<T, V> row(int round) const { return read<T>(stage(round)); }
  // What was copied from `from`, or is there, where nothing is copied.
  __device__ Packed<T, V> row(int round, const T* from) const {
    if constexpr (V == 1) {
      return load_row<T, V>(from);
    } else {
      return row(round);
    }
  }
  __device__ Packed<G, V> grad(int round, const G* from) const {
    if constexpr (V == 1) {
      return load_row<G, V>(from);
    } else {
      return read<G>(stage(round) + kRowPieces * kPiece);
    }
  }
  // Waits for the `Count` oldest of kDepth rounds.
  template <int Count>
  __device__ static void wait() {
    if constexpr (V > 1) wait_for_older_copies<kDepth - Count>();
  }

 private:
  template <int Pieces>
  __device__ static void copy(unsigned char* to, const void* from) {
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      copy_async(reinterpret_cast<float*>(to + i * kPiece), static_cast<const float*>(from) + 4 * i, true);
    }
  }
  template <class X>
  __device__ static Packed<X, V> read(const unsigned char* from) {
    Packed<X, V> x;
#pragma unroll
    for (int i = 0; i < Packed<X, V>::kWords / 4; ++i) {
      const uint4 q = *reinterpret_cast<const uint4*>(from + i * kPiece);
      x.word[4 * i] = q.x;
      x.word[4 * i + 1] = q.y;
      x.word[4 * i + 2] = q.z;
      x.word[4 * i + 3] = q.w;
    }
    return x;
  }
};

// to[index], or adds to it what the slices before have given.
__device__ inline void put(float* to, float x, int slice) { *to = slice > 0 ? *to + x : x; }

template <class T, class G, int V, int Columns, Quant Q>
__device__ inline void move_written(const Params& a, const Place<V, Columns>& at) {
  using Lanes = SliceLanes<V, Columns>;
  constexpr int kLanes = Lanes::lanes, kTeams = Place<V, Columns>::kTeams;
  const unsigned team = team_mask<kLanes>();
  const int64_t p = at.p;
  const Side& side = a.write;
  const SlotRecords all = side.records_of(p, a.decay + p * side.slots_stride, a.num_slots);
  const SlotRecords reads = a.read.records_of(p, nullptr, a.num_slots);
  float* dk_eff = a.dk_eff + at.part * side.part_entries + p * side.entry_stride;
  float* dk_carry = a.dk_carry + at.part * side.part_entries + p * side.entry_stride;
  float* dq_eff = a.dq_eff + at.part * a.read.part_entries + p * a.read.entry_stride;
  float* ddecay = a.ddecay + at.part * a.part_slots + p * side.slots_stride;
  const uint8_t* snapshot = static_cast<const uint8_t*>(a.snapshot) + p * side.slots_stride * a.row_bytes;
  const float* scale = a.scale + p * side.slots_stride;
  const int bank_row = static_cast<int>(a.width * sizeof(T)), grad_row = static_cast<int>(a.width * sizeof(G));
  const int acc_row = static_cast<int>(a.width * sizeof(float));
  const WarpRecords records = at.records(side, all, true);
  using Rounds = RowRounds<T, G, V, kTeams>;
  const Rounds rounds(at.stages, records);
  const int token = at.token(side);
  const bool own = all.stored != nullptr && token < a.tokens;

  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(at.part) * a.part_slices + sl) * Columns;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(Columns), a.width - column0));
    T* bank = static_cast<T*>(a.bank) + at.bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + at.bank_base + column0;
    const T* dy_rows = static_cast<const T*>(a.dy) + p * a.token_stride + column0;
    const float* du_rows = a.du + p * a.token_stride + column0;
    const float* delta_rows = a.delta + p * a.token_stride + column0;
    // A lane's part of the rows of one token: dret and delta.
    const auto dret_of = [&](int t, int s, float (&x)[V]) {
      const int c = Lanes::column(at.lane, s);
      if (c >= columns) return;
      // du is scaled by -beta; or it comes as dv = beta du.
      float factor = -1.0f;
      if (a.beta != nullptr) {
        const float beta = a.beta[p * a.beta_stride + t];
        factor = a.written[p * a.written_stride + t] > 0 ? -beta : 0.0f;
      }
      unpack<float, V>(load_row<float, V>(row_at(du_rows + c, t, acc_row)), x);
#pragma unroll
      for (int j = 0; j < V; ++j) x[j] *= factor;
    };
    const auto delta_of = [&](int t, int s, float (&x)[V]) {
      const int c = Lanes::column(at.lane, s);
      if (c < columns) load<float, V>(row_at(delta_rows + c, t, acc_row), x);
    };
    const auto restored = [&](const SlotRecord& record, int c) {
      const float row_scale = Q == Quant::fp8 || Q == Quant::int4 ? scale[record.index()] : 0.0f;
      return restore<T, V, Q>(row_at(snapshot, record.index(), a.row_bytes), row_scale, column0 + c);
    };
    // Snapshot rows of other modes become bank rows when they are taken.
    constexpr bool kCopies = Q == Quant::none;
    const auto issue = [&](int round) {
      if constexpr (V > 1) {
        const SlotRecord record = round < rounds.all ? rounds.record(round, at.team) : SlotRecord::none();
        const int c = Lanes::column(at.lane, 0);
        if (record.slot() >= 0 && c < columns) {
          rounds.copy_grad(round, row_at(d_bank + c, record.slot(), grad_row));
          const uint8_t* stored = row_at(snapshot, record.index(), a.row_bytes);
          if constexpr (kCopies) {
            rounds.copy_row(round, reinterpret_cast<const T*>(stored) + column0 + c);
          } else {
            prefetch_row(stored + (Q == Quant::bf16  ? 2 * (column0 + c)
                                   : Q == Quant::fp8 ? column0 + c
                                                     : (column0 + c) / 2));
          }
        }
        end_copies();  // every round has its own
      }
    };
    // The bank row, which goes back to the bank, and the gradient row.
    const auto take = [&](const SlotRecord& record, int round, float (&row)[Lanes::steps][V],
                          float (&grad)[Lanes::steps][V]) {
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(at.lane, s);
        Packed<T, V> packed_row = {};
        Packed<G, V> packed_grad = {};
        if (record.slot() >= 0 && c < columns) {
          packed_grad = rounds.grad(round, row_at(d_bank + c, record.slot(), grad_row));
          if constexpr (V > 1 && kCopies) {
            packed_row = rounds.row(round);
          } else {
            packed_row = restored(record, c);
          }
          store_packed_row<T, V>(row_at(bank + c, record.slot(), bank_row), packed_row);
        }
        unpack<T, V>(packed_row, row[s]);
        unpack<G, V>(packed_grad, grad[s]);
      }
    };
    const auto store_grad = [&](const SlotRecord& record, const float (&moved)[Lanes::steps][V]) {
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(at.lane, s);
        if (record.slot() >= 0 && c < columns) store_row<G, V>(row_at(d_bank + c, record.slot(), grad_row), moved[s]);
      }
    };
    for (int round = 0; round < Rounds::kDepth; ++round) issue(round);
    float dret[Lanes::steps][V] = {}, delta[Lanes::steps][V] = {};
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      if (own) delta_of(token, s, delta[s]);
    }
    if (sl == 0) wait_for_previous();
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      if (own) dret_of(token, s, dret[s]);
    }
    for (int round = 0; round < rounds.simple; round += kHeld) {
      float dots[kHeld] = {}, effs[kHeld] = {}, carries[kHeld] = {};
      rounds.template wait<kHeld>();
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const SlotRecord record = rounds.record(round + k, at.team);
        float row[Lanes::steps][V], grad[Lanes::steps][V];
        take(record, round + k, row, grad);
        issue(round + k + Rounds::kDepth);
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dots[k] += grad[s][j] * row[s][j];
            effs[k] += dret[s][j] * row[s][j];
            carries[k] += delta[s][j] * grad[s][j];
            grad[s][j] = record.decay() * grad[s][j] + record.weight() * dret[s][j];
          }
        }
        store_grad(record, grad);
      }
      const float dot = team_sums<kLanes>(dots), eff = team_sums<kLanes>(effs), carry = team_sums<kLanes>(carries);
      const SlotRecord record = rounds.record(round + at.lane / (kLanes / kHeld), at.team);
      if (at.lane % (kLanes / kHeld) == 0 && record.slot() >= 0) {
        put(ddecay + record.index(), record.decay() * dot, sl);
        put(dk_eff + records.position(record), eff, sl);
        put(dk_carry + records.position(record), carry, sl);
      }
    }
    // Slots of several entries, and those that the chunk reads.
    for (int round = rounds.simple; round < rounds.all; ++round) {
      const SlotRecord record = rounds.record(round, at.team);
      float row[Lanes::steps][V], grad[Lanes::steps][V], moved[Lanes::steps][V];
      rounds.template wait<1>();
      take(record, round, row, grad);
      issue(round + Rounds::kDepth);
      if (record.slot() < 0) continue;
      float dot = 0;
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          dot += grad[s][j] * row[s][j];
          moved[s][j] = record.decay() * grad[s][j];
        }
      }
      dot = team_sum<kLanes>(dot, team) * record.decay();
      if (at.lane == 0) put(ddecay + record.index(), dot, sl);
      const auto add_entry = [&](int position, float weight, const float (&x)[Lanes::steps][V],
                                 const float (&d)[Lanes::steps][V]) {
        float eff = 0, carry = 0;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            eff += x[s][j] * row[s][j];
            carry += d[s][j] * grad[s][j];
            moved[s][j] += weight * x[s][j];
          }
        }
        eff = team_sum<kLanes>(eff, team);
        carry = team_sum<kLanes>(carry, team);
        if (at.lane == 0) {
          put(dk_eff + position, eff, sl);
          put(dk_carry + position, carry, sl);
        }
      };
      const auto look_up = [&](int position, float weight) {
        const int t = side.by_entries(position);
        float x[Lanes::steps][V] = {}, d[Lanes::steps][V] = {};
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
          dret_of(t, s, x[s]);
          delta_of(t, s, d[s]);
        }
        add_entry(position, weight, x, d);
      };
      const int position = records.position(record);
      if (own) add_entry(position, all.weights[position], dret, delta);  // the first entry is the token's
      all.for_further_writes(record, look_up);
      if (record.linked()) {
        reads.for_reads(record, record.link(), [&](int position, float weight) {
          const int t = a.read.by_entries(position);
          float sum = 0;
#pragma unroll
          for (int s = 0; s < Lanes::steps; ++s) {
            const int c = Lanes::column(at.lane, s);
            float y[V] = {};
            if (c < columns) load<T, V>(row_at(dy_rows + c, t, bank_row), y);
#pragma unroll
            for (int j = 0; j < V; ++j) {
              sum += y[j] * row[s][j];
              moved[s][j] += weight * y[j];
            }
          }
          sum = team_sum<kLanes>(sum, team);
          if (at.lane == 0) put(dq_eff + position, sum, sl);
        });
      }
      store_grad(record, moved);
    }
    __syncwarp();
  }
}

template <class T, class G, int V, int Columns>
__device__ inline void move_read(const Params& a, const Place<V, Columns>& at) {
  using Lanes = SliceLanes<V, Columns>;
  constexpr int kLanes = Lanes::lanes, kTeams = Place<V, Columns>::kTeams;
  const unsigned team = team_mask<kLanes>();
  const int64_t p = at.p;
  const Side& side = a.read;
  const SlotRecords all = side.records_of(p, nullptr, a.num_slots);
  float* dq_eff = a.dq_eff + at.part * side.part_entries + p * side.entry_stride;
  const int bank_row = static_cast<int>(a.width * sizeof(T)), grad_row = static_cast<int>(a.width * sizeof(G));
  const WarpRecords records = at.records(side, all, false);
  using Rounds = RowRounds<T, G, V, kTeams>;
  const Rounds rounds(at.stages, records);
  const int token = at.token(side);
  const bool own = all.stored != nullptr && token < a.tokens;
  for (int sl = 0; sl < a.part_slices; ++sl) {
    const int64_t column0 = (static_cast<int64_t>(at.part) * a.part_slices + sl) * Columns;
    if (column0 >= a.width) break;
    const int columns = static_cast<int>(min(static_cast<int64_t>(Columns), a.width - column0));
    const T* bank = static_cast<const T*>(a.bank) + at.bank_base + column0;
    G* d_bank = static_cast<G*>(a.d_bank) + at.bank_base + column0;
    const T* dy_rows = static_cast<const T*>(a.dy) + p * a.token_stride + column0;
    const auto dy_of = [&](int t, int s, float (&x)[V]) {
      const int c = Lanes::column(at.lane, s);
      if (c < columns) load<T, V>(row_at(dy_rows + c, t, bank_row), x);
    };
    const auto issue = [&](int round) {
      if constexpr (V > 1) {
        const SlotRecord record = round < rounds.all ? rounds.record(round, at.team) : SlotRecord::none();
        const int c = Lanes::column(at.lane, 0);
        if (record.slot() >= 0 && c < columns) {
          rounds.copy_grad(round, row_at(d_bank + c, record.slot(), grad_row));
          rounds.copy_row(round, row_at(bank + c, record.slot(), bank_row));
        }
        end_copies();  // every round has its own
      }
    };
    const auto take = [&](const SlotRecord& record, int round, float (&row)[Lanes::steps][V],
                          float (&grad)[Lanes::steps][V]) {
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(at.lane, s);
        Packed<T, V> packed_row = {};
        Packed<G, V> packed_grad = {};
        if (record.slot() >= 0 && c < columns) {
          packed_grad = rounds.grad(round, row_at(d_bank + c, record.slot(), grad_row));
          packed_row = rounds.row(round, row_at(bank + c, record.slot(), bank_row));
        }
        unpack<T, V>(packed_row, row[s]);
        unpack<G, V>(packed_grad, grad[s]);
      }
    };
    const auto store_grad = [&](const SlotRecord& record, const float (&moved)[Lanes::steps][V]) {
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(at.lane, s);
        if (record.slot() >= 0 && c < columns) store_row<G, V>(row_at(d_bank + c, record.slot(), grad_row), moved[s]);
      }
    };
    for (int round = 0; round < Rounds::kDepth; ++round) issue(round);
    float dy[Lanes::steps][V] = {};
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
      if (own) dy_of(token, s, dy[s]);
    }
    for (int round = 0; round < rounds.simple; round += kHeld) {
      float dots[kHeld] = {};
      rounds.template wait<kHeld>();
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        const SlotRecord record = rounds.record(round + k, at.team);
        float row[Lanes::steps][V], grad[Lanes::steps][V];
        take(record, round + k, row, grad);
        issue(round + k + Rounds::kDepth);
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            dots[k] += dy[s][j] * row[s][j];
            grad[s][j] += record.weight() * dy[s][j];
          }
        }
        store_grad(record, grad);
      }
      const float dot = team_sums<kLanes>(dots);
      const SlotRecord record = rounds.record(round + at.lane / (kLanes / kHeld), at.team);
      if (at.lane % (kLanes / kHeld) == 0 && record.slot() >= 0) put(dq_eff + records.position(record), dot, sl);
    }
    for (int round = rounds.simple; round < rounds.all; ++round) {
      const SlotRecord record = rounds.record(round, at.team);
      float row[Lanes::steps][V], grad[Lanes::steps][V];
      rounds.template wait<1>();
      take(record, round, row, grad);
      issue(round + Rounds::kDepth);
      if (record.slot() < 0) continue;
      const auto add_entry = [&](int position, float weight, const float (&y)[Lanes::steps][V]) {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sum += y[s][j] * row[s][j];
            grad[s][j] += weight * y[s][j];
          }
        }
        sum = team_sum<kLanes>(sum, team);
        if (at.lane == 0) put(dq_eff + position, sum, sl);
      };
      const auto look_up = [&](int position, float weight) {
        float y[Lanes::steps][V] = {};
#pragma unroll
        for (int s = 0; s < Lanes::steps; ++s) dy_of(side.by_entries(position), s, y[s]);
        add_entry(position, weight, y);
      };
      const int position = records.position(record);
      if (own) add_entry(position, record.weight(), dy);  // the first entry is the token's
      all.for_reads(record, record.next(), look_up);
      store_grad(record, grad);
    }
    __syncwarp();
  }
}

template <class T, class G, int V, int Columns, Quant Q>
__global__ void __launch_bounds__(kThreads, V == 1 ? 1 : 3) gradient_mover_kernel(const __grid_constant__ Params a) {
  __shared__ SlotRecord records[kWarps][WarpRecords::kRoom];
  extern __shared__ __align__(16) unsigned char stages[];
  using Lanes = SliceLanes<V, Columns>;
  Place<V, Columns> at;
  // Slots that are only read come first: they have nothing to wait for.
  const int read_blocks = a.streams * a.read.groups * a.parts;
  const bool reads = static_cast<int>(blockIdx.x) < read_blocks;
  const int block = reads ? blockIdx.x : blockIdx.x - read_blocks, groups = reads ? a.read.groups : a.write.groups;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  at.index = block / a.parts % groups * kWarps + warp;
  at.part = a.first_part + block % a.parts;
  at.p = a.first_stream + block / a.parts / groups;
  at.lane = threadIdx.x % Lanes::lanes;
  at.team = threadIdx.x % 32 / Lanes::lanes;
  at.bank_base = at.p / a.streams_per_bank * a.bank_stride;
  at.shared = records[warp];
  at.stages = stages + warp * RowRounds<T, G, V, Place<V, Columns>::kTeams>::kBytes;
  if (reads) {
    move_read<T, G, V, Columns>(a, at);
  } else {
    move_written<T, G, V, Columns, Q>(a, at);
  }
  let_next_start();
}

template <class T, class G, int V, int Columns>
auto kernel_for(Quant quant) {
  switch (quant) {
    case Quant::none:
      return gradient_mover_kernel<T, G, V, Columns, Quant::none>;
    case Quant::bf16:
      return gradient_mover_kernel < T, G, V, Columns, std::is_same_v<T, bf16> ? Quant::none : Quant::bf16 > ;
    case Quant::fp8:
      return gradient_mover_kernel<T, G, V, Columns, Quant::fp8>;
    case Quant::int4:
      break;
  }
  return gradient_mover_kernel<T, G, V, Columns, Quant::int4>;
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
    x.records = linked ? static_cast<const int4*>(records) + c.stored_chunk * s.chunk * entries : nullptr;
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
    // Without records, a warp takes slots in the order of the list.
    x.per_token = linked ? static_cast<int>(entries) : kItems;
    x.items = linked ? gradient_mover_items(s, entries, kItems) : kItems;
    x.token_warps = static_cast<int>(div_up(x.per_token, x.items));
    const int64_t tokens = linked ? c.tokens : div_up(most, kItems);
    x.groups = static_cast<int>(div_up(tokens * x.token_warps, kWarps));
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
  a.row_bytes = static_cast<int>(snapshot_row_bytes(b.quant, element, s.width));
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
  a.first_part = static_cast<int>(range.begin / (slice_columns(s) * a.part_slices));
  a.first_stream = range.first_stream;
  a.streams = static_cast<int>(range.streams);
  a.parts = static_cast<int>(div_up(range.end - range.begin, slice_columns(s) * a.part_slices));
  a.tokens = c.tokens;
  a.streams_per_bank = static_cast<int>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  const auto run = [&](auto type, auto grad, auto v) {
    using T = decltype(type);
    using G = decltype(grad);
    constexpr int V = decltype(v)::value;
    auto kernel = kernel_for<T, G, V, kSlice>(b.quant);
    if constexpr (V > 1) {
      if (has_wide_slices(s)) kernel = kernel_for<T, G, V, kWideSlice>(b.quant);
    }
    const size_t shared_bytes = kWarps * RowRounds<T, G, V, 1>::kBytes;
    return launch(kernel, dim3(a.parts * (a.write.groups + a.read.groups) * range.streams), kThreads, shared_bytes,
                  where, a);
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
