// Solve: X = (I + diag(beta) tril(A, -1))^-1 by forward substitution, and QX = QK X (section 3 of
// the specification), in full precision. Bound by arithmetic on two C by C triangles.
#pragma once

#include "ffi/cpu/chunk_view.h"
#include "ffi/cpu/kernels.h"

namespace sdm::cpu::SDM_ISA {

template <class T>
void solve(const Forward& f, int64_t p, int64_t n) {
  using A = Acc<T>;
  const ChunkView view(f.shape, p, n);
  const int64_t chunk = f.shape.chunk;
  const A* a = at<A>(f.chunks.a, view.square());
  const A* qk = at<A>(f.chunks.qk, view.square());
  const A* beta = at<A>(f.in.beta, view.token);
  A* x = at<A>(f.x, view.square());
  A* qx = at<A>(f.qx, view.square());
  for (int64_t i = 0; i < chunk * chunk; ++i) x[i] = qx[i] = 0;
  for (int64_t t = 0; t < chunk; ++t) x[t * chunk + t] = 1;

  // out[0..columns) += weight * row: the rows are short and stay in cache.
  const auto add = [&](A* out, A weight, const A* row, int64_t columns) {
    for_tiles<1, A>(columns, [&](int64_t c, auto tile) __attribute__((always_inline)) {
      tile.store(out + c, 0, tile.load(out + c, 0) + weight * tile.load(row + c, 0));
    });
  };
  for (int64_t t = 1; t < view.tokens; ++t) {
    if (f.chunks.writes[view.stored_token + t] <= 0) continue;  // its beta is not looked at
    for (int64_t j = 0; j < t; ++j) {
      const A weight = a[t * chunk + j];
      if (weight != 0) add(x + t * chunk, -beta[t] * weight, x + j * chunk, j + 1);
    }
  }
  for (int64_t t = 0; t < view.tokens; ++t) {
    for (int64_t j = 0; j <= t; ++j) {
      const A weight = qk[t * chunk + j];
      if (weight != 0) add(qx + t * chunk, weight, x + j * chunk, j + 1);
    }
  }
}

}  // namespace sdm::cpu::SDM_ISA
