// Decode: the recurrence itself for one token a stream (section 1 of the specification). Bound by
// the W + R rows read and the W rows written.
#pragma once

#include <cmath>

#include "ffi/cpu/chunk_view.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/phase1.h"

namespace sdm::cpu::SDM_ISA {

template <class T>
void decode(const Decode& d, int64_t p, Columns columns, void* scratch) {
  using A = Acc<T>;
  const Shape& s = d.shape;
  const int64_t stride = s.width, width = columns.end - columns.begin;
  const int32_t* k_idx = d.in.k_idx + p * s.writes;
  const int32_t* q_idx = d.in.q_idx + p * s.reads;
  const T* k_val = at<T>(d.in.k_val, p * s.writes);
  const T* q_val = at<T>(d.in.q_val, p * s.reads);
  const A* g = at<A>(d.in.g, p * s.gates);
  const T* v = at<T>(d.in.v, p * stride + columns.begin);
  T* rows = at<T>(d.bank, p / s.streams_per_bank * s.slots * stride + columns.begin);
  T* y = at<T>(d.y, p * stride + columns.begin);
  const auto valid = [&](int32_t id) { return id >= 0 && id < s.slots; };

  A* delta = static_cast<A*>(scratch);  // [D]
  A* decay = delta + stride;            // [W] of an entry's slot
  A* weight = decay + s.writes;         // [W] weights of the slot, added up at its first entry; else 0
  int32_t* first = reinterpret_cast<int32_t*>(weight + s.writes);  // [W] the slot's first entry, -1 if dropped
  bool any = false;
  for (int64_t w = 0; w < s.writes; ++w) {
    first[w] = -1;
    weight[w] = 0;
    if (!valid(k_idx[w])) continue;
    any = true;
    int64_t e = 0;
    while (k_idx[e] != k_idx[w]) ++e;
    first[w] = static_cast<int32_t>(e);
    if (e == w) decay[w] = exponential(g[s.gates == 1 ? 0 : w], A{});
    weight[e] += to_acc(k_val[w]);
  }
  for_tiles<8, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
    Vec<A> acc[tile.size] = {};
    for (int64_t w = 0; w < s.writes; ++w) {
      if (first[w] != w) continue;
      const T* row = rows + k_idx[w] * stride + c;
      for (int k = 0; k < tile.size; ++k) acc[k] += weight[w] * (decay[w] * tile.load(row, k));
    }
    const A beta = any ? at<A>(d.in.beta, p)[0] : 0;
    for (int k = 0; k < tile.size; ++k) {
      tile.store(delta + c, k, any ? beta * (tile.load(v + c, k) - acc[k]) : Vec<A>{});
    }
  });
  for (int64_t w = 0; w < s.writes; ++w) {
    if (first[w] != w) continue;
    T* row = rows + k_idx[w] * stride;
    for_tiles<8, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
      for (int k = 0; k < tile.size; ++k) {
        tile.store(row + c, k, decay[w] * tile.load(row + c, k) + weight[w] * tile.load(delta + c, k));
      }
    });
  }
  for_tiles<8, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
    Vec<A> acc[tile.size] = {};
    for (int64_t r = 0; r < s.reads; ++r) {
      if (!valid(q_idx[r])) continue;
      const T* row = rows + q_idx[r] * stride + c;
      for (int k = 0; k < tile.size; ++k) acc[k] += to_acc(q_val[r]) * tile.load(row, k);
    }
    for (int k = 0; k < tile.size; ++k) tile.store(y + c, k, acc[k]);
  });
}

}  // namespace sdm::cpu::SDM_ISA
