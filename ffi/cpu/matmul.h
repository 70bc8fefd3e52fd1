// The dual matmul of a chunk and its backward: products with the chunk's triangular matrices
// (sections 3 and 4 of the specification). Bound by arithmetic; operands of a column range stay in cache.
#pragma once

#include "ffi/cpu/chunk_view.h"
#include "ffi/cpu/kernels.h"

namespace sdm::cpu::SDM_ISA {

inline constexpr int kRowBlock = 4;

// For a block of `Rows` rows from t: init(i) + sum over t' of L[t, t'] in[t'] for the lower triangular
// L, or of L[t', t] in[t'] when Transposed. `init` gives the first value of row t + i, `done` takes the last.
template <int Rows, bool Transposed, class In, class A, class Init, class Done>
inline __attribute__((always_inline)) void triangular_rows(const A* matrix, int64_t ld, int64_t tokens, int64_t t,
                                                           const In* in, int64_t stride, int64_t width, Init init,
                                                           Done done) {
  const int64_t begin = Transposed ? t : 0;
  const int64_t end = Transposed ? tokens : t + Rows;
  for_tiles<2, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
    Vec<A> acc[Rows][tile.size];
    for (int i = 0; i < Rows; ++i) {
      for (int k = 0; k < tile.size; ++k) acc[i][k] = init(t + i, c, tile, k);
    }
    for (int64_t j = begin; j < end; ++j) {
      Vec<A> x[tile.size];
      for (int k = 0; k < tile.size; ++k) x[k] = tile.load(in + j * stride + c, k);
      for (int i = 0; i < Rows; ++i) {
        const A weight = Transposed ? matrix[j * ld + t + i] : matrix[(t + i) * ld + j];
        for (int k = 0; k < tile.size; ++k) acc[i][k] += weight * x[k];
      }
    }
    for (int i = 0; i < Rows; ++i) {
      for (int k = 0; k < tile.size; ++k) done(t + i, c, tile, k, acc[i][k]);
    }
  });
}

template <bool Transposed, class In, class A, class Init, class Done>
void triangular_matmul(const A* matrix, int64_t ld, int64_t tokens, const In* in, int64_t stride, int64_t width,
                       Init init, Done done) {
  int64_t t = 0;
  for (; t + kRowBlock <= tokens; t += kRowBlock) {
    triangular_rows<kRowBlock, Transposed>(matrix, ld, tokens, t, in, stride, width, init, done);
  }
  for (; t < tokens; ++t) {
    triangular_rows<1, Transposed>(matrix, ld, tokens, t, in, stride, width, init, done);
  }
}

// out[t, t'] = <left[t], right[t']> for t' <= t (t' < t when Strict), zero elsewhere in the [C, C] square.
template <bool Strict, class Left, class A>
void triangular_outer(const Left* left, const A* right, int64_t tokens, int64_t stride, int64_t width, A* out,
                      int64_t chunk) {
  for (int64_t i = 0; i < chunk * chunk; ++i) out[i] = 0;
  constexpr int kBlock = 4;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t end = Strict ? t : t + 1;
    const Left* row = left + t * stride;
    int64_t j = 0;
    for (; j + kBlock <= end; j += kBlock) {
      const auto sums =
          sum_tiles<A, kBlock>(width, [&](int64_t c, auto tile, auto sums) __attribute__((always_inline)) {
            const Vec<A> x = tile.load(row + c, 0);
            for (int i = 0; i < kBlock; ++i) sums.v[i] += x * tile.load(right + (j + i) * stride + c, 0);
            return sums;
          });
      for (int i = 0; i < kBlock; ++i) out[t * chunk + j + i] = sum<A>(sums.v[i]);
    }
    for (; j < end; ++j) {
      const auto sums = sum_tiles<A, 1>(width, [&](int64_t c, auto tile, auto sums) __attribute__((always_inline)) {
        sums.v[0] += tile.load(row + c, 0) * tile.load(right + j * stride + c, 0);
        return sums;
      });
      out[t * chunk + j] = sum<A>(sums.v[0]);
    }
  }
}

// error = v - retrieved, u = beta error, delta = X u, y = inter + QX u. A token that writes nothing
// has error 0 and its v and beta are not looked at.
template <class T>
void dual_matmul(const Forward& f, int64_t p, int64_t n, Columns columns) {
  using A = Acc<T>;
  const ChunkView view(f.shape, p, n);
  const int64_t stride = f.shape.width, width = columns.end - columns.begin, chunk = f.shape.chunk;
  const int64_t row = view.token * stride + columns.begin;
  const int64_t stored_row = view.stored_token * stride + columns.begin;
  const int64_t chunk_row = view.one_chunk_row() + columns.begin;
  const T* v = at<T>(f.in.v, row);
  const A* beta = at<A>(f.in.beta, view.token);
  const A* retrieved = at<A>(f.retrieved, chunk_row);
  const A* inter = at<A>(f.inter, chunk_row);
  A* u = at<A>(f.u, chunk_row);
  A* error = at<A>(f.error, stored_row);
  A* delta = at<A>(f.delta, stored_row);
  T* y = at<T>(f.y, row);

  for (int64_t t = 0; t < view.tokens; ++t) {
    const bool writes = f.chunks.writes[view.stored_token + t] > 0;
    for_tiles<4, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
      const int64_t at = t * stride + c;
      for (int k = 0; k < tile.size; ++k) {
        Vec<A> e = {}, scaled = {};
        if (writes) {
          e = tile.load(v + at, k) - tile.load(retrieved + at, k);
          scaled = beta[t] * e;
        }
        tile.store(error + at, k, e);
        tile.store(u + at, k, scaled);
      }
    });
  }
  triangular_matmul<false>(
      at<A>(f.x, view.square()), chunk, view.tokens, u, stride, width,
      [](int64_t, int64_t, auto, int) __attribute__((always_inline)) { return Vec<A>{}; },
      [&](int64_t t, int64_t c, auto tile, int k, Vec<A> value)
          __attribute__((always_inline)) { tile.store(delta + t * stride + c, k, value); });
  triangular_matmul<false>(
      at<A>(f.qx, view.square()), chunk, view.tokens, u, stride, width,
      [&](int64_t t, int64_t c, auto tile, int k)
          __attribute__((always_inline)) { return tile.load(inter + t * stride + c, k); },
      [&](int64_t t, int64_t c, auto tile, int k, Vec<A> value)
          __attribute__((always_inline)) { tile.store(y + t * stride + c, k, value); });
}

// Of one part of the columns, from du in the place of dv: dv = beta du, and the sums over its columns, the
// gradients of A, QK and beta.
template <class T>
void du_sums(const Backward& b, const ChunkView& view, Columns part) {
  using A = Acc<T>;
  const Shape& s = b.shape;
  const int64_t stride = s.width, width = part.end - part.begin, chunk = s.chunk;
  const int64_t row = view.token * stride + part.begin;
  const int64_t square = part.part * s.streams * s.stored_chunks * chunk * chunk + view.square();
  const A* beta = at<A>(b.in.beta, view.token);
  const A* error = at<A>(b.error, row);
  const A* delta = at<A>(b.delta, row);
  const A* a = at<A>(b.chunks.a, view.square());
  A* du = at<A>(b.dv, row);  // scaled by beta at the end
  A* da = at<A>(b.da, square);
  A* dbeta = at<A>(b.dbeta, part.part * s.streams * s.tokens + view.token);

  triangular_outer<false>(at<T>(b.dy, row), delta, view.tokens, stride, width, at<A>(b.dqk, square), chunk);
  triangular_outer<true>(du, delta, view.tokens, stride, width, da, chunk);
  for (int64_t t = 0; t < view.tokens; ++t) {
    const bool writes = b.chunks.writes[view.stored_token + t] > 0;
    const A scale = beta[t];
    const auto sums = sum_tiles<A, 1>(width, [&](int64_t c, auto tile, auto sums) __attribute__((always_inline)) {
      const int64_t at = t * stride + c;
      const Vec<A> x = tile.load(du + at, 0);
      sums.v[0] += tile.load(error + at, 0) * x;
      tile.store(du + at, 0, writes ? scale * x : Vec<A>{});
      return sums;
    });
    A total = sum<A>(sums.v[0]);
    for (int64_t j = 0; j < t; ++j) {
      const A product = da[t * chunk + j];
      total -= a[t * chunk + j] * product;
      da[t * chunk + j] = writes ? -beta[t] * product : 0;
    }
    dbeta[t] = writes ? total : 0;
  }
}

// ddelta = QK^T dY + carried; du = X^T ddelta; dv = beta du; the gradients of A, QK and beta.
template <class T>
void du_matmul(const Backward& b, int64_t p, int64_t n, Columns columns) {
  using A = Acc<T>;
  const ChunkView view(b.shape, p, n);
  const int64_t stride = b.shape.width, width = columns.end - columns.begin, chunk = b.shape.chunk;
  const int64_t row = view.token * stride + columns.begin;
  A* ddelta = at<A>(b.carried, view.one_chunk_row() + columns.begin);
  A* du = at<A>(b.dv, row);

  triangular_matmul<true>(
      at<A>(b.chunks.qk, view.square()), chunk, view.tokens, at<T>(b.dy, row), stride, width,
      [&](int64_t t, int64_t c, auto tile, int k)
          __attribute__((always_inline)) { return tile.load(ddelta + t * stride + c, k); },
      [&](int64_t t, int64_t c, auto tile, int k, Vec<A> value)
          __attribute__((always_inline)) { tile.store(ddelta + t * stride + c, k, value); });
  triangular_matmul<true>(
      at<A>(b.x, view.square()), chunk, view.tokens, static_cast<const A*>(ddelta), stride, width,
      [](int64_t, int64_t, auto, int) __attribute__((always_inline)) { return Vec<A>{}; },
      [&](int64_t t, int64_t c, auto tile, int k, Vec<A> value)
          __attribute__((always_inline)) { tile.store(du + t * stride + c, k, value); });
  columns.for_parts([&](Columns part) { du_sums<T>(b, view, part); });
}

}  // namespace sdm::cpu::SDM_ISA
