// Phase 1: what a chunk's ids, weights and gates say without the bank (section 3 of the
// specification), and its backward (section 4). The entries are sorted by slot; then each slot is
// walked once. Bound by the sort and by one exponential for each pair of equal slots.
//
// Decays are exponentials of sums of only the gates in between, never of differences of sums, and
// the gradient of a gate sums only the pairs that straddle it.
#pragma once

#include <cmath>

#include "ffi/cpu/kernels.h"
#include "ffi/cpu/slots.h"

namespace sdm::cpu::SDM_ISA {

inline float exponential(double x, float) { return expf(static_cast<float>(x)); }
inline double exponential(double x, double) { return exp(x); }

// Sorts the valid entries by slot, keeping their order within a slot (radix sort of slot | position).
// Returns the sorted keys, which lie in `keys` or in `spare`; `count` receives their number.
inline const uint64_t* sort_entries(const int32_t* ids, int64_t entries, int64_t num_slots, uint64_t* keys,
                                    uint64_t* spare, int64_t* count) {
  int64_t n = 0;
  for (int64_t i = 0; i < entries; ++i) {
    if (ids[i] >= 0 && ids[i] < num_slots) keys[n++] = static_cast<uint64_t>(ids[i]) << 32 | static_cast<uint64_t>(i);
  }
  const int digit = n < 512 ? 6 : 11;
  for (int shift = 32; (num_slots - 1) >> (shift - 32) > 0; shift += digit) {
    int32_t starts[1 << 11];
    const uint64_t mask = (uint64_t{1} << digit) - 1;
    for (uint64_t i = 0; i <= mask; ++i) starts[i] = 0;
    for (int64_t i = 0; i < n; ++i) ++starts[keys[i] >> shift & mask];
    int32_t sum = 0;
    for (uint64_t i = 0; i <= mask; ++i) {
      const int32_t here = starts[i];
      starts[i] = sum;
      sum += here;
    }
    for (int64_t i = 0; i < n; ++i) spare[starts[keys[i] >> shift & mask]++] = keys[i];
    uint64_t* swap = keys;
    keys = spare;
    spare = swap;
  }
  *count = n;
  return keys;
}

// Lists the distinct slots of sorted keys.
inline void list_slots(const uint64_t* keys, int64_t count, int64_t entries, int64_t most, int32_t* slots,
                       int32_t* starts, int32_t* order) {
  int64_t distinct = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = static_cast<int32_t>(keys[i] >> 32);
    if (distinct == 0 || slots[distinct - 1] != slot) {
      slots[distinct] = slot;
      starts[distinct++] = static_cast<int32_t>(i);
    }
    order[i] = static_cast<int32_t>(keys[i] & 0xffffffffu);
  }
  for (int64_t i = count; i < entries; ++i) order[i] = -1;
  for (int64_t i = distinct; i < most; ++i) slots[i] = -1;
  for (int64_t i = distinct; i <= most; ++i) starts[i] = static_cast<int32_t>(count);
}

// The tokens that write one slot, in order, with the gate that each applies and the sum of its
// weights; and the slot's entries.
template <class A>
struct SlotTokens {
  int64_t size = 0;
  double* gate;     // [C]
  double* since;    // [C] sum of the gates up to and with this token
  double* dgate;    // [C] backward only
  double* dweight;  // [C] backward only
  double* terms;    // [C] backward only
  A* weight;        // [C] weights of the token's entries, added up
  int32_t* token;   // [C] within the chunk
  int64_t entries = 0;
  int32_t* position;  // [C * W] of an entry
  int32_t* index;     // [C * W] of its token in the arrays above

  // Carves the arrays out of `scratch`, slot_tokens_bytes long.
  SlotTokens(void* scratch, const Shape& s) {
    gate = static_cast<double*>(scratch);
    since = gate + s.chunk;
    dgate = since + s.chunk;
    dweight = dgate + s.chunk;
    terms = dweight + s.chunk;
    weight = reinterpret_cast<A*>(terms + s.chunk);
    token = reinterpret_cast<int32_t*>(weight + s.chunk);
    position = token + s.chunk;
    index = position + s.chunk * s.writes;
  }

  // Collects the entries of slot `i` of `lists`; whatever is not in the order of tokens is left out.
  template <class T>
  void collect(const SlotLists& lists, int64_t i, const T* k_val, const A* g, const Shape& s) {
    size = entries = 0;
    double sum = 0;
    for (int64_t e = lists.begin(i); e < lists.end(i); ++e) {
      const int32_t at = lists.order[e];
      const int32_t t = static_cast<int32_t>(at / s.writes);
      if (!lists.valid(at) || (size > 0 && t < token[size - 1])) continue;
      const A kappa = to_acc(k_val[at]);
      if (size > 0 && token[size - 1] == t) {
        weight[size - 1] += kappa;
      } else {
        token[size] = t;
        gate[size] = g[s.gates == 1 ? t : at];
        since[size] = sum += gate[size];
        weight[size++] = kappa;
      }
      position[entries] = at;
      index[entries++] = static_cast<int32_t>(size - 1);
    }
  }
};

// Calls f(w, r) for every slot of either list, ascending; w (r) is its index in the write (read)
// list, or -1 where the slot is only read (written).
template <class F>
inline void for_all_slots(const SlotLists& writes, const SlotLists& reads, F&& f) {
  int64_t w = 0, r = 0;
  while (writes.listed(w) || reads.listed(r)) {
    const bool write = writes.listed(w) && (!reads.listed(r) || writes.slots[w] <= reads.slots[r]);
    const bool read = reads.listed(r) && (!writes.listed(w) || reads.slots[r] <= writes.slots[w]);
    f(write ? w : -1, read ? r : -1);
    w += write;
    r += read;
  }
}

template <class T>
void phase1(const Forward& f, int64_t p, int64_t n, void* scratch) {
  using A = Acc<T>;
  const ChunkView view(f.shape, p, n);
  const Shape& s = f.shape;
  const int64_t chunk = s.chunk, write_entries = view.tokens * s.writes, read_entries = view.tokens * s.reads;
  const int32_t* k_idx = f.in.k_idx + view.token * s.writes;
  const int32_t* q_idx = f.in.q_idx + view.token * s.reads;
  const T* k_val = at<T>(f.in.k_val, view.token * s.writes);
  const T* q_val = at<T>(f.in.q_val, view.token * s.reads);
  const A* g = at<A>(f.in.g, view.token * s.gates);
  A* a = at<A>(f.chunks.a, view.square());
  A* qk = at<A>(f.chunks.qk, view.square());
  A* k_eff = at<A>(f.chunks.k_eff, view.stored_token * s.writes);
  A* k_carry = at<A>(f.chunks.k_carry, view.stored_token * s.writes);
  A* q_eff = at<A>(f.chunks.q_eff, view.stored_token * s.reads);
  A* decay = at<A>(f.chunks.decay, view.stored_chunk * s.write_slots);
  int32_t* written = f.chunks.writes + view.stored_token;

  const SlotLists writes = write_slots(f.chunks, view);
  const SlotLists reads = read_slots(f.chunks, view);
  uint64_t* keys = static_cast<uint64_t*>(scratch);
  const int64_t most_entries = chunk * (s.writes > s.reads ? s.writes : s.reads);
  uint64_t* spare = keys + most_entries;
  int64_t count = 0;
  const uint64_t* sorted = sort_entries(k_idx, write_entries, s.slots, keys, spare, &count);
  list_slots(sorted, count, chunk * s.writes, s.write_slots, const_cast<int32_t*>(writes.slots),
             const_cast<int32_t*>(writes.starts), const_cast<int32_t*>(writes.order));
  sorted = sort_entries(q_idx, read_entries, s.slots, keys, spare, &count);
  list_slots(sorted, count, chunk * s.reads, s.read_slots, const_cast<int32_t*>(reads.slots),
             const_cast<int32_t*>(reads.starts), const_cast<int32_t*>(reads.order));

  for (int64_t i = 0; i < chunk * chunk; ++i) a[i] = qk[i] = 0;
  for (int64_t i = 0; i < write_entries; ++i) k_eff[i] = k_carry[i] = 0;
  for (int64_t i = 0; i < read_entries; ++i) q_eff[i] = 0;
  for (int64_t i = 0; i < s.write_slots; ++i) decay[i] = 1;
  for (int64_t t = 0; t < view.tokens; ++t) {
    written[t] = 0;
    for (int64_t w = 0; w < s.writes; ++w) written[t] += view.valid(k_idx[t * s.writes + w]);
  }

  SlotTokens<A> slot(spare + most_entries, s);
  for_all_slots(writes, reads, [&](int64_t w, int64_t r) {
    slot.size = slot.entries = 0;
    if (w >= 0) {
      slot.collect(writes, w, k_val, g, s);
      double after = 0;  // the decay that is still to come
      for (int64_t e = slot.entries - 1; e >= 0; --e) {
        const int64_t i = slot.index[e];
        const A kappa = to_acc(k_val[slot.position[e]]);
        if (e + 1 < slot.entries && slot.index[e + 1] != i) after += slot.gate[i + 1];
        k_eff[slot.position[e]] = kappa * exponential(slot.since[i], A{});
        k_carry[slot.position[e]] = kappa * exponential(after, A{});
      }
      decay[w] = exponential(slot.since[slot.size - 1], A{});
      for (int64_t later = 1; later < slot.size; ++later) {
        A* row = a + slot.token[later] * chunk;
        double between = slot.gate[later];
        for (int64_t earlier = later - 1; earlier >= 0; --earlier) {
          row[slot.token[earlier]] += slot.weight[later] * slot.weight[earlier] * exponential(between, A{});
          between += slot.gate[earlier];
        }
      }
    }
    if (r >= 0) {
      int64_t seen = 0;  // tokens that have written the slot when it is read
      for (int64_t e = reads.begin(r); e < reads.end(r); ++e) {
        const int32_t position = reads.order[e];
        const int64_t t = position / s.reads;
        const A q = to_acc(q_val[position]);
        while (seen < slot.size && slot.token[seen] <= t) ++seen;
        q_eff[position] = seen > 0 ? q * exponential(slot.since[seen - 1], A{}) : q;
        double between = 0;
        for (int64_t earlier = seen - 1; earlier >= 0; --earlier) {
          qk[t * chunk + slot.token[earlier]] += q * slot.weight[earlier] * exponential(between, A{});
          between += slot.gate[earlier];
        }
      }
    }
  });
}

template <class T>
void phase1_backward(const Backward& b, int64_t p, int64_t n, void* scratch) {
  using A = Acc<T>;
  const ChunkView view(b.shape, p, n);
  const Shape& s = b.shape;
  const int64_t chunk = s.chunk;
  const T* k_val = at<T>(b.in.k_val, view.token * s.writes);
  const T* q_val = at<T>(b.in.q_val, view.token * s.reads);
  const A* g = at<A>(b.in.g, view.token * s.gates);
  const A* k_eff = at<A>(b.chunks.k_eff, view.stored_token * s.writes);
  const A* k_carry = at<A>(b.chunks.k_carry, view.stored_token * s.writes);
  const A* q_eff = at<A>(b.chunks.q_eff, view.stored_token * s.reads);
  const A* da = at<A>(b.da, view.square());
  const A* dqk = at<A>(b.dqk, view.square());
  const A* dk_eff = at<A>(b.dk_eff, view.token * s.writes);
  const A* dk_carry = at<A>(b.dk_carry, view.token * s.writes);
  const A* dq_eff = at<A>(b.dq_eff, view.token * s.reads);
  const A* ddecay = at<A>(b.ddecay, view.stored_chunk * s.write_slots);
  A* dk_val = at<A>(b.dk_val, view.token * s.writes);
  A* dq_val = at<A>(b.dq_val, view.token * s.reads);
  A* dg = at<A>(b.dg, view.token * s.gates);

  const SlotLists writes = write_slots(b.chunks, view);
  const SlotLists reads = read_slots(b.chunks, view);
  for (int64_t i = 0; i < writes.entries; ++i) dk_val[i] = 0;
  for (int64_t i = 0; i < reads.entries; ++i) dq_val[i] = 0;
  for (int64_t i = 0; i < view.tokens * s.gates; ++i) dg[i] = 0;

  SlotTokens<A> slot(scratch, s);
  // Adds the terms[0..last) of one reader, each to the gates after its own token up to `last`.
  const auto add_straddling = [&](int64_t last) {
    double run = 0;
    for (int64_t i = 1; i <= last; ++i) {
      run += slot.terms[i - 1];
      slot.dgate[i] += run;
    }
  };
  for_all_slots(writes, reads, [&](int64_t w, int64_t r) {
    slot.size = slot.entries = 0;
    if (w >= 0) {
      slot.collect(writes, w, k_val, g, s);
      for (int64_t i = 0; i < slot.size; ++i) slot.dgate[i] = slot.dweight[i] = 0;
      for (int64_t later = 1; later < slot.size; ++later) {
        const A* row = da + slot.token[later] * chunk;
        double between = slot.gate[later];
        for (int64_t earlier = later - 1; earlier >= 0; --earlier) {
          const A grad = row[slot.token[earlier]] * exponential(between, A{});
          slot.dweight[later] += grad * slot.weight[earlier];
          slot.dweight[earlier] += grad * slot.weight[later];
          slot.terms[earlier] = static_cast<double>(grad * slot.weight[later]) * slot.weight[earlier];
          between += slot.gate[earlier];
        }
        add_straddling(later);
      }
    }
    if (r >= 0) {
      int64_t seen = 0;
      for (int64_t e = reads.begin(r); e < reads.end(r); ++e) {
        const int32_t position = reads.order[e];
        if (!reads.valid(position)) continue;
        const int64_t t = position / s.reads;
        const A q = to_acc(q_val[position]);
        while (seen < slot.size && slot.token[seen] <= t) ++seen;
        double grad_q = dq_eff[position] * (seen > 0 ? exponential(slot.since[seen - 1], A{}) : A{1});
        double between = 0;
        for (int64_t earlier = seen - 1; earlier >= 0; --earlier) {
          const A grad = dqk[t * chunk + slot.token[earlier]] * exponential(between, A{});
          grad_q += grad * slot.weight[earlier];
          slot.dweight[earlier] += grad * q;
          slot.terms[earlier] = static_cast<double>(grad * q) * slot.weight[earlier];
          between += slot.gate[earlier];
        }
        dq_val[position] = static_cast<A>(grad_q);
        if (seen > 0) {
          add_straddling(seen - 1);
          // The read's row passed every gate up to its token.
          const double term = static_cast<double>(q_eff[position]) * dq_eff[position];
          for (int64_t i = 0; i < seen; ++i) slot.dgate[i] += term;
        }
      }
    }
    // The slot's own entries: those of earlier tokens are carried through a gate to the chunk's end,
    // those from its token on have read through it.
    double carried = 0;
    for (int64_t e = 0; e < slot.entries; ++e) {
      const int32_t position = slot.position[e];
      if (e > 0 && slot.index[e] != slot.index[e - 1]) slot.dgate[slot.index[e]] += carried;
      carried += static_cast<double>(k_carry[position]) * dk_carry[position];
    }
    double read_through = 0, after = 0;
    for (int64_t e = slot.entries - 1; e >= 0; --e) {
      const int32_t position = slot.position[e];
      const int64_t i = slot.index[e];
      if (e + 1 < slot.entries && slot.index[e + 1] != i) after += slot.gate[i + 1];
      dk_val[position] = static_cast<A>(exponential(slot.since[i], A{}) * dk_eff[position] +
                                        exponential(after, A{}) * dk_carry[position] + slot.dweight[i]);
      read_through += static_cast<double>(k_eff[position]) * dk_eff[position];
      const bool first = e == 0 || slot.index[e - 1] != i;  // the entry whose gate the token applies
      if (first) {
        dg[s.gates == 1 ? slot.token[i] : position] += static_cast<A>(slot.dgate[i] + read_through + ddecay[w]);
      }
    }
  });
}

}  // namespace sdm::cpu::SDM_ISA
