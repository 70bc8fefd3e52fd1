// Mover: decay and write of a chunk's slots, the snapshot of their rows, and the backward's movers
// (sections 3 to 5 of the specification). One visit of a row for each slot and chunk, in the order
// of the slots, so every sum has a fixed order and a row is rounded once. Bound by the rows moved.
#pragma once

#include <type_traits>

#include "ffi/cpu/kernels.h"
#include "ffi/cpu/slots.h"
#include "ffi/cpu/snapshot.h"

namespace sdm::cpu::SDM_ISA {

// Rows this far on in a list are asked for while one is worked on: about the latency of memory.
inline constexpr int64_t kAhead = 8;

template <class T>
inline void prefetch_slot(const T* rows, const SlotLists& lists, int64_t i, int64_t stride, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (!lists.listed(i + kAhead)) return;
  const T* row = rows + lists.slots[i + kAhead] * stride;
  for (int64_t c = 0; c < width; c += kLine) __builtin_prefetch(row + c, 1);
}

// Banks of more bytes than this (all streams together) leave the caches before a row's next visit.
inline constexpr int64_t kCachedBytes = int64_t{1} << 24;

// Stores row `i` of the chunk's snapshot. `row` points to column 0.
template <class T>
inline void snapshot_row(const Forward& f, const ChunkView& view, int64_t i, const T* row, Columns columns) {
  const int64_t index = view.stored_chunk * f.shape.write_slots + i;
  char* stored = at<char>(f.snapshot, index * snapshot_row_bytes(f.quant, f.dtype, f.shape.width));
  store_snapshot_row(f.quant, row, stored, f.scale ? f.scale + index : nullptr, columns.begin, columns.end);
}

template <class T>
void take_snapshot(const Forward& f, int64_t p, int64_t n, Columns columns) {
  const ChunkView view(f.shape, p, n);
  const SlotLists lists = write_slots(f.chunks, view);
  const T* bank = at<T>(f.bank, view.bank());
  for (int64_t i = 0; lists.listed(i); ++i) {
    snapshot_row(f, view, i, bank + lists.slots[i] * f.shape.width, columns);
  }
  finish_streaming();
}

template <class T>
void mover(const Forward& f, int64_t p, int64_t n, Columns columns) {
  using A = Acc<T>;
  const ChunkView view(f.shape, p, n);
  const int64_t stride = f.shape.width, writes = f.shape.writes, width = columns.end - columns.begin;
  const SlotLists lists = write_slots(f.chunks, view);
  T* bank = at<T>(f.bank, view.bank());
  const A* carry = at<A>(f.chunks.k_carry, view.stored_token * writes);
  const A* decay = at<A>(f.chunks.decay, view.stored_chunk * f.shape.write_slots);
  const A* delta = at<A>(f.delta, view.stored_token * stride + columns.begin);
  for (int64_t i = 0; lists.listed(i); ++i) {
    T* row = bank + lists.slots[i] * stride;
    prefetch_slot(bank + columns.begin, lists, i, stride, width);
    if (f.snapshot) snapshot_row(f, view, i, static_cast<const T*>(row), columns);
    const int64_t begin = lists.begin(i), end = lists.end(i);
    T* part = row + columns.begin;
    for_tiles<8, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
      Vec<A> acc[tile.size];
      for (int k = 0; k < tile.size; ++k) acc[k] = decay[i] * tile.load(part + c, k);
      for (int64_t e = begin; e < end; ++e) {
        const int32_t position = lists.order[e];
        if (!lists.valid(position)) continue;
        const A* from = delta + position / writes * stride + c;
        for (int k = 0; k < tile.size; ++k) acc[k] += carry[position] * tile.load(from, k);
      }
      for (int k = 0; k < tile.size; ++k) tile.store(part + c, k, acc[k]);
    });
  }
  if (f.snapshot) finish_streaming();
}

// Calls f(position, is_first, is_last) for the valid entries of slot `i`, in order.
template <class F>
inline __attribute__((always_inline)) void for_entries(const SlotLists& lists, int64_t i, F&& f) {
  using Yes = std::true_type;
  using No = std::false_type;
  const int64_t end = lists.end(i);
  const auto next = [&](int64_t e) {
    while (e < end && !lists.valid(lists.order[e])) ++e;
    return e;
  };
  int64_t e = next(lists.begin(i));
  if (e >= end) return;
  int64_t following = next(e + 1);
  if (following >= end) {
    f(lists.order[e], Yes{}, Yes{});
    return;
  }
  f(lists.order[e], Yes{}, No{});
  for (e = following; (following = next(e + 1)) < end; e = following) f(lists.order[e], No{}, No{});
  f(lists.order[e], No{}, Yes{});
}

// Restores the slots that the chunk wrote, then: the dots dk_eff, dk_carry and ddecay with the old
// gradient rows, and dM <- decay dM + sum of k_eff dret, where dret = -dv.
template <class T, class G>
void write_mover(const Backward& b, int64_t p, int64_t n, Columns columns, void* scratch) {
  using A = Acc<T>;
  const ChunkView view(b.shape, p, n);
  const Shape& s = b.shape;
  const int64_t stride = s.width, writes = s.writes, width = columns.end - columns.begin;
  const int64_t first = view.stored_chunk * s.write_slots;
  const int64_t row_bytes = snapshot_row_bytes(b.quant, b.dtype, s.width);
  const bool past_caches = s.streams / s.streams_per_bank * s.slots * stride * sizeof(T) > kCachedBytes;
  const SlotLists lists = write_slots(b.chunks, view);
  T* bank = at<T>(b.bank, view.bank());
  G* d_bank = at<G>(b.d_bank, view.bank());
  const A* k_eff = at<A>(b.chunks.k_eff, view.stored_token * writes);
  const A* decay = at<A>(b.chunks.decay, first);
  const A* delta = at<A>(b.delta, view.token * stride);
  const A* dv = at<A>(b.dv, view.token * stride);
  // Sums of part 0, and how far on those of the next part are.
  A* dk_eff = at<A>(b.dk_eff, view.token * writes);
  A* dk_carry = at<A>(b.dk_carry, view.token * writes);
  A* ddecay = at<A>(b.ddecay, first);
  const int64_t next_part = s.streams * s.tokens * writes, next_decay = s.streams * s.stored_chunks * s.write_slots;
  A* scratch_grad = static_cast<A*>(scratch);

  columns.for_parts([&](Columns c) {
    for (int64_t i = 0; i < lists.entries; ++i) dk_eff[c.part * next_part + i] = dk_carry[c.part * next_part + i] = 0;
    for (int64_t i = 0; i < s.write_slots; ++i) ddecay[c.part * next_decay + i] = 0;
  });
  for (int64_t i = 0; lists.listed(i); ++i) {
    T* bank_row = bank + lists.slots[i] * stride;
    G* d_row = d_bank + lists.slots[i] * stride;
    if (!past_caches) prefetch_slot(bank + columns.begin, lists, i, stride, width);
    prefetch_slot(d_bank + columns.begin, lists, i, stride, width);
    const char* stored = at<char>(b.snapshot, (first + i) * row_bytes);
    if (lists.listed(i + kAhead)) {
      const char* next = stored + kAhead * row_bytes;
      for (int64_t c = row_bytes * columns.begin / stride; c < row_bytes * columns.end / stride; c += 64) {
        __builtin_prefetch(next + c);
      }
    }
    restore_snapshot_row(b.quant, stored, b.scale ? b.scale[first + i] : 0, bank_row, columns.begin, columns.end,
                         past_caches);
    // What the bank row now holds; read from the snapshot where that has the same bits, so that no load
    // has to wait for the stores just made.
    const T* row = b.quant == Quant::none ? reinterpret_cast<const T*>(stored) : bank_row;
    const A decayed = decay[i];

    // One pass over the old gradient row for each entry; the first also decays it. The last writes the
    // new row over the old one, the others collect it in scratch.
    columns.for_parts([&](Columns part) __attribute__((always_inline)) {
      const int64_t width = part.end - part.begin;
      const T* m_row = row + part.begin;
      G* grad_row = d_row + part.begin;
      for_entries(lists, i, [&](int32_t position, auto is_first, auto is_last) __attribute__((always_inline)) {
        const int64_t token = position / writes * stride + part.begin;
        const A* from_dv = dv + token;
        const A* from_delta = delta + token;
        const A weight = k_eff[position];
        const auto sums = sum_tiles<A, 3>(width, [&](int64_t c, auto tile, auto sums) __attribute__((always_inline)) {
          const Vec<A> m = tile.load(m_row + c, 0), grad = tile.load(grad_row + c, 0), d = tile.load(from_dv + c, 0);
          sums.v[0] -= d * m;
          sums.v[1] += tile.load(from_delta + c, 0) * grad;
          Vec<A> before;
          if constexpr (is_first.value) {
            sums.v[2] += grad * m;
            before = decayed * grad;
          } else {
            before = tile.load(scratch_grad + c, 0);
          }
          if constexpr (is_last.value) {
            tile.store(grad_row + c, 0, before - weight * d);
          } else {
            tile.store(scratch_grad + c, 0, before - weight * d);
          }
          return sums;
        });
        dk_eff[part.part * next_part + position] = sum<A>(sums.v[0]);
        dk_carry[part.part * next_part + position] = sum<A>(sums.v[1]);
        if constexpr (is_first.value) ddecay[part.part * next_decay + i] = decayed * sum<A>(sums.v[2]);
      });
    });
  }
  if (past_caches) finish_streaming();
}

// dq_eff = <dY, M[s]> with the restored rows, and dM[s] += q_eff dY.
template <class T, class G>
void read_mover(const Backward& b, int64_t p, int64_t n, Columns columns, void* scratch) {
  using A = Acc<T>;
  const ChunkView view(b.shape, p, n);
  const int64_t stride = b.shape.width, reads = b.shape.reads;
  const SlotLists lists = read_slots(b.chunks, view);
  const T* bank = at<T>(b.bank, view.bank());
  G* d_bank = at<G>(b.d_bank, view.bank());
  const A* q_eff = at<A>(b.chunks.q_eff, view.stored_token * reads);
  const T* dy = at<T>(b.dy, view.token * stride);
  A* dq_eff = at<A>(b.dq_eff, view.token * reads);                     // of part 0
  const int64_t next_part = b.shape.streams * b.shape.tokens * reads;  // from part to part
  A* scratch_grad = static_cast<A*>(scratch);

  columns.for_parts([&](Columns part) __attribute__((always_inline)) {
    for (int64_t i = 0; i < lists.entries; ++i) dq_eff[part.part * next_part + i] = 0;
  });
  for (int64_t i = 0; lists.listed(i); ++i) {
    const T* row = bank + lists.slots[i] * stride;
    G* d_row = d_bank + lists.slots[i] * stride;
    prefetch_slot(bank + columns.begin, lists, i, stride, columns.end - columns.begin);
    prefetch_slot(d_bank + columns.begin, lists, i, stride, columns.end - columns.begin);
    columns.for_parts([&](Columns part) __attribute__((always_inline)) {
      const int64_t width = part.end - part.begin;
      const T* m_row = row + part.begin;
      G* grad_row = d_row + part.begin;
      for_entries(lists, i, [&](int32_t position, auto is_first, auto is_last) __attribute__((always_inline)) {
        const T* from = dy + position / reads * stride + part.begin;
        const A weight = q_eff[position];
        const auto sums = sum_tiles<A, 1>(width, [&](int64_t c, auto tile, auto sums) __attribute__((always_inline)) {
          const Vec<A> d = tile.load(from + c, 0);
          sums.v[0] += d * tile.load(m_row + c, 0);
          Vec<A> before;
          if constexpr (is_first.value) {
            before = tile.load(grad_row + c, 0);
          } else {
            before = tile.load(scratch_grad + c, 0);
          }
          if constexpr (is_last.value) {
            tile.store(grad_row + c, 0, before + weight * d);
          } else {
            tile.store(scratch_grad + c, 0, before + weight * d);
          }
          return sums;
        });
        dq_eff[part.part * next_part + position] = sum<A>(sums.v[0]);
      });
    });
  }
}

}  // namespace sdm::cpu::SDM_ISA
