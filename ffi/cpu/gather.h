// Gather: weighted sums of the bank rows that a chunk's tokens name (sections 3 and 4 of the
// specification). Bound by the rows it reads: W (R) rows of each token, once.
#pragma once

#include "ffi/cpu/chunk_view.h"
#include "ffi/cpu/kernels.h"

namespace sdm::cpu::SDM_ISA {

// out[t] = sum of weights[t, e] * rows[ids[t, e]] over the valid ids of token t. `rows` and `out`
// point to the first column of the range.
template <class T, class A = Acc<T>>
void weighted_rows(const ChunkView& view, const T* rows, const int32_t* ids, const A* weights, int64_t entries, A* out,
                   int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t stride = view.s.width;
  for (int64_t t = 0; t < view.tokens; ++t) {
    const int32_t* id = ids + t * entries;
    const A* weight = weights + t * entries;
    const bool more = t + 1 < view.tokens;
    for_tiles<8, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
      constexpr int64_t columns = tile.size * kLanes<A>;
      Vec<A> acc[tile.size] = {};
      for (int64_t e = 0; e < entries; ++e) {
        if (more && view.valid(id[entries + e])) {  // the next token's row is on its way while this one is summed
          const T* next = rows + id[entries + e] * stride + c;
          for (int64_t i = 0; i < columns; i += kLine) __builtin_prefetch(next + i);
        }
        if (!view.valid(id[e])) continue;
        const T* row = rows + id[e] * stride + c;
        for (int k = 0; k < tile.size; ++k) acc[k] += weight[e] * tile.load(row, k);
      }
      for (int k = 0; k < tile.size; ++k) tile.store(out + t * stride + c, k, acc[k]);
    });
  }
}

template <class T>
void gather(const Forward& f, int64_t p, int64_t n, Columns columns) {
  using A = Acc<T>;
  const ChunkView view(f.shape, p, n);
  const int64_t width = columns.end - columns.begin;
  const T* rows = at<T>(f.bank, view.bank() + columns.begin);
  const int64_t out = view.one_chunk_row() + columns.begin;
  weighted_rows(view, rows, f.in.k_idx + view.token * f.shape.writes,
                at<A>(f.chunks.k_eff, view.stored_token * f.shape.writes), f.shape.writes, at<A>(f.retrieved, out),
                width);
  weighted_rows(view, rows, f.in.q_idx + view.token * f.shape.reads,
                at<A>(f.chunks.q_eff, view.stored_token * f.shape.reads), f.shape.reads, at<A>(f.inter, out), width);
}

template <class G>
void gather_gradient(const Backward& b, int64_t p, int64_t n, Columns columns) {
  using A = Acc<G>;
  const ChunkView view(b.shape, p, n);
  weighted_rows(view, at<G>(b.d_bank, view.bank() + columns.begin), b.in.k_idx + view.token * b.shape.writes,
                at<A>(b.chunks.k_carry, view.stored_token * b.shape.writes), b.shape.writes,
                at<A>(b.carried, view.one_chunk_row() + columns.begin), columns.end - columns.begin);
}

}  // namespace sdm::cpu::SDM_ISA
