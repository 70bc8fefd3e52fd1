// Product-key top-k and its backward (section 6 of the specification). Rows are ranked side by side, one in
// each lane of a vector, by networks of comparisons, so that no branch depends on a score. Bound by arithmetic.
#pragma once

#include <limits>

#include "cuda/sdm.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/snapshot.h"

namespace sdm::cpu::SDM_ISA {

// A key has a candidate's score in its upper half, which compares as the specification orders scores; its
// lower half says which candidate it is, the larger winning on ties.
typedef int64_t Keys __attribute__((vector_size(kVectorBytes)));
typedef int32_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef float Scores __attribute__((vector_size(kVectorBytes / 2)));
inline constexpr int kRows = kVectorBytes / 8;

inline Keys make_keys(Scores scores, int64_t low) {
  const Halves bits = scores == scores ? (Halves)scores : static_cast<int32_t>(0xff800000);  // NaN is -inf
  return (__builtin_convertvector(bits ^ ((bits >> 31) & 0x7fffffff), Keys) << 32) | low;
}
inline Scores scores_of(Keys keys) {
  const Halves bits = __builtin_convertvector(keys >> 32, Halves);
  return (Scores)(bits ^ ((bits >> 31) & 0x7fffffff));
}

// ---- networks; sizes are powers of two, the largest keys come first

inline void exchange(Keys& a, Keys& b) {
  const Keys larger = b > a ? b : a;
  b = b > a ? a : b;
  a = larger;
}

// Sorts what is bitonic.
inline void clean(Keys* x, int64_t size) {
  for (int64_t stride = size / 2; stride > 0; stride /= 2) {
    for (int64_t base = 0; base < size; base += 2 * stride) {
      for (int64_t i = base; i < base + stride; ++i) exchange(x[i], x[i + stride]);
    }
  }
}

inline void sort_keys(Keys* x, int64_t size) {
  for (int64_t length = 2; length <= size; length *= 2) {
    for (Keys* part = x; part < x + size; part += length) {
      for (int64_t i = 0; i < length / 2; ++i) exchange(part[i], part[length - 1 - i]);
      clean(part, length / 2);
      clean(part + length / 2, length / 2);
    }
  }
}

// The largest `size` of `count` keys into `best`, sorted; the last of them are the least key where count is
// less. `make(i)` is key i, asked for in order; `block` has room for `size` keys.
template <class Make>
void largest(int64_t count, int64_t size, Keys* best, Keys* block, Make make) {
  for (int64_t begin = 0; begin < count; begin += size) {
    Keys* keys = begin == 0 ? best : block;
    for (int64_t i = 0; i < size; ++i) {
      keys[i] = begin + i < count ? make(begin + i) : Keys{} + std::numeric_limits<int64_t>::min();
    }
    sort_keys(keys, size);
    if (begin == 0) continue;
    for (int64_t i = 0; i < size; ++i) best[i] = block[size - 1 - i] > best[i] ? block[size - 1 - i] : best[i];
    clean(best, size);
  }
}

// ---- one call

// The sum of a slot's scores in the accumulator of their dtype, first factor first, NaN as -inf.
template <class T>
Acc<T> slot_score(const ProductKey& p, const T* row, int64_t slot) {
  const auto number = [](Acc<T> x) { return x == x ? x : -std::numeric_limits<Acc<T>>::infinity(); };
  Acc<T> sum = 0;
  int64_t below = 1, start = 0;  // slots of the factors that follow; first column
  for (int64_t m = 1; m < p.num_factors; ++m) below *= p.factors[m];
  for (int64_t m = 0; m < p.num_factors; ++m) {
    const Acc<T> score = number(to_acc(row[start + slot / below % p.factors[m]]));
    sum = m == 0 ? score : number(sum + score);
    start += p.factors[m];
    if (m + 1 < p.num_factors) below /= p.factors[m + 1];
  }
  return sum;
}

// Rows begin .. end. `scratch` holds topk_scratch_bytes.
template <class T>
void topk(const ProductKey& p, int64_t begin, int64_t end, void* scratch) {
  int64_t size = 1;
  while (size < p.k) size *= 2;
  constexpr uintptr_t kAlign = sizeof(Keys);
  Keys* best = reinterpret_cast<Keys*>((reinterpret_cast<uintptr_t>(scratch) + kAlign - 1) / kAlign * kAlign);
  Keys* next = best + size;
  Keys* merged = next + size;
  Keys* block = merged + size;
  Halves* slots = reinterpret_cast<Halves*>(block + size);  // of `best`
  Halves* merged_slots = slots + size;

  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t rows = end - first < kRows ? end - first : kRows;
    const T* row[kRows];  // lanes without a row repeat the first
    for (int r = 0; r < kRows; ++r) row[r] = at<T>(p.scores, (first + (r < rows ? r : 0)) * p.columns);

    int64_t start = 0, count = 1;  // column of the factor; slots in `best`
    for (int64_t m = 0; m < p.num_factors; ++m) {
      const int64_t n = p.factors[m], ranked = n < p.k ? n : p.k;
      largest(n, size, m == 0 ? best : next, block, [&](int64_t c) {
        Scores scores;
        for (int r = 0; r < kRows; ++r) scores[r] = static_cast<float>(to_acc(row[r][start + c]));
        return make_keys(scores, c);
      });
      start += n;
      if (m == 0) {
        count = ranked;
        for (int64_t i = 0; i < count; ++i) slots[i] = __builtin_convertvector(best[i] & 0xffffffff, Halves);
        continue;
      }
      // Of the ranks i so far and j of this factor, only pairs with (i + 1) (j + 1) <= k can win. Ties go to
      // the larger i + j, then to the larger i.
      int64_t i = 0, j = 0, pairs = 0;
      for (int64_t a = 0; a < count; ++a) pairs += p.k / (a + 1) < ranked ? p.k / (a + 1) : ranked;
      largest(pairs, size, merged, block, [&](int64_t) {
        Scores sum = scores_of(best[i]) + scores_of(next[j]);
        if constexpr (std::is_same_v<T, bf16>) {
          const Halves bits = (Halves)sum;
          const Halves nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & static_cast<int32_t>(0xffff0000);
          sum = sum == sum ? (Scores)nearest : sum;
        }
        const Keys keys = make_keys(sum, (i + j) << 16 | i);
        if (++j == ranked || (i + 1) * (j + 1) > p.k) ++i, j = 0;
        return keys;
      });
      count = pairs < p.k ? pairs : p.k;
      for (int64_t rank = 0; rank < count; ++rank) {
        for (int r = 0; r < kRows; ++r) {
          const int64_t a = merged[rank][r] & 0xffff, b = (merged[rank][r] >> 16 & 0xffff) - a;
          merged_slots[rank][r] = static_cast<int32_t>(slots[a][r] * n + (next[b][r] & 0xffffffff));
        }
      }
      std::swap(best, merged);
      std::swap(slots, merged_slots);
    }

    // By slot, with the score's bits below it.
    for (int64_t i = 0; i < p.k; ++i) {
      const Keys bits = __builtin_convertvector((Halves)scores_of(best[i]), Keys) & 0xffffffff;
      best[i] = __builtin_convertvector(~slots[i], Keys) << 32 | bits;
    }
    for (int64_t i = p.k; i < size; ++i) best[i] = Keys{} + std::numeric_limits<int64_t>::min();
    sort_keys(best, size);
    for (int64_t i = 0; i < p.k; ++i) {
      for (int r = 0; r < rows; ++r) {
        const int64_t out = (first + r) * p.k + i;
        const int64_t slot = ~(best[i][r] >> 32);
        p.ids[out] = static_cast<int32_t>(slot);
        if constexpr (std::is_same_v<T, double>) {
          at<T>(p.values, 0)[out] = slot_score(p, row[r], slot);
        } else if constexpr (std::is_same_v<T, bf16>) {
          at<T>(p.values, 0)[out].bits = static_cast<uint16_t>(best[i][r] >> 16);
        } else {
          at<T>(p.values, 0)[out] = bits_to_float(static_cast<uint32_t>(best[i][r]));
        }
      }
    }
  }
}

// d_scores of rows begin .. end: the cotangents of the selected slots on their columns, added in the order of
// the slots. `scratch` holds topk_scratch_bytes.
template <class T>
void topk_backward(const ProductKeyBackward& p, int64_t begin, int64_t end, void* scratch) {
  using A = Acc<T>;
  A* sums = static_cast<A*>(scratch);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t c = 0; c < p.columns; ++c) sums[c] = 0;
    for (int64_t i = row * p.k; i < (row + 1) * p.k; ++i) {
      const A d = to_acc(at<T>(p.d_values, 0)[i]);
      int64_t slot = p.ids[i], start = p.columns;
      if (slot < 0) continue;
      for (int64_t m = p.num_factors - 1; m >= 0; --m) {
        start -= p.factors[m];
        sums[start + slot % p.factors[m]] += d;
        slot /= p.factors[m];
      }
    }
    T* out = at<T>(p.d_scores, row * p.columns);
    for_tiles<1, A>(p.columns, [&](int64_t c, auto tile) { tile.store(out + c, 0, tile.load(sums + c, 0)); });
  }
}

}  // namespace sdm::cpu::SDM_ISA
