// Backward of Phase 1: gradients of the weights and gates from those of A, QK and the decayed weights
// (section 4 of the specification), in two kernels. In the first, many blocks a chunk, a thread takes a slot that
// one entry writes, and a team of lanes a slot of a few entries, a lane an entry. In the second, a block a chunk,
// a warp takes a slot of more entries and keeps the slot's tokens in shared memory. Bound by latency: dependent
// look-ups in the lists.
//
// The gradient of a gate sums only the pairs that straddle it, and decays are exponentials of sums of
// only the gates in between.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;  // half in the second kernel where shared memory is short
constexpr int kTeam = 8;       // lanes, and the most entries of a slot that a team takes
constexpr int kTeams = 32 / kTeam;
constexpr int kEach = 4;  // entries of a kind that a thread of the first kernel takes

struct Params {
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val;
  const float *decay, *g, *k_eff, *k_carry, *q_eff, *da, *dqk, *dk_eff, *dk_carry, *dq_eff, *ddecay;
  const int32_t *slots, *starts, *order, *read_slots, *read_starts, *read_order;
  const int4 *write_records, *read_records;  // or null
  float *dk_val, *dg, *dq_val, *dx;
  int64_t tokens, chunks;
  int chunk, writes, reads, gates, write_slots, read_slots_most, num_slots;
  Divider by_writes, by_reads;
};

__device__ inline float decayed(double x) { return expf(static_cast<float>(x)); }

// One chunk of the arrays. Entries of a chunk go by position: token * W + w, token * R + r.
template <class T>
struct Chunk {
  const int32_t *k_idx, *q_idx;
  const T *k_val, *q_val;
  const float *g, *k_eff, *k_carry, *q_eff, *dk_eff, *dk_carry, *dq_eff, *da, *dqk, *ddecay;
  float *dk_val, *dq_val, *dx, *dg;
  int tokens, chunk, writes, reads, gates;
  Divider by_writes, by_reads;
  SlotLists write, read;
  SlotRecords write_records, read_records;

  __device__ Chunk(const Params& a, int64_t stored)
      : chunk(a.chunk), writes(a.writes), reads(a.reads), gates(a.gates), by_writes(a.by_writes), by_reads(a.by_reads) {
    const int64_t p = stored / a.chunks, n = stored % a.chunks;
    tokens = static_cast<int>(min(static_cast<int64_t>(chunk), a.tokens - n * chunk));
    const int64_t token = p * a.tokens + n * chunk, entry0 = token * writes, read0 = token * reads;
    k_idx = a.k_idx + entry0;
    q_idx = a.q_idx + read0;
    k_val = static_cast<const T*>(a.k_val) + entry0;
    q_val = static_cast<const T*>(a.q_val) + read0;
    g = a.g + token * gates;
    k_eff = a.k_eff + entry0;
    k_carry = a.k_carry + entry0;
    q_eff = a.q_eff + read0;
    dk_eff = a.dk_eff + entry0;
    dk_carry = a.dk_carry + entry0;
    dq_eff = a.dq_eff + read0;
    da = a.da + stored * chunk * chunk;
    dqk = a.dqk + stored * chunk * chunk;
    ddecay = a.ddecay + stored * a.write_slots;
    dk_val = a.dk_val + entry0;
    dq_val = a.dq_val + read0;
    dx = gates == 1 ? a.dx + entry0 : a.dg + entry0;
    dg = a.dg + token * gates;
    write = {a.slots + stored * a.write_slots,
             a.starts + stored * (a.write_slots + 1),
             a.order + stored * chunk * writes,
             a.write_slots,
             tokens * writes,
             a.num_slots};
    read = {a.read_slots + stored * a.read_slots_most,
            a.read_starts + stored * (a.read_slots_most + 1),
            a.read_order + stored * chunk * reads,
            a.read_slots_most,
            tokens * reads,
            a.num_slots};
    write_records = {a.write_records == nullptr ? nullptr : a.write_records + stored * chunk * writes, write, k_eff,
                     a.decay + stored * a.write_slots};
    read_records = {a.read_records == nullptr ? nullptr : a.read_records + stored * chunk * reads, read, q_eff,
                    nullptr};
  }
  __device__ float gate_of(int t, int position) const { return gates == 1 ? g[t] : g[position]; }
};

// Goes through the positions of the reads of a written slot: `position` is -1 after the last.
struct SlotReads {
  const SlotRecords& all;
  int position = -1;
  int e = 0, end = 0;  // where there are no records

  __device__ SlotReads(const SlotRecords& reads, const SlotRecord& written) : all(reads) {
    if (written.slot() < 0) return;
    if (all.stored != nullptr) {
      if (written.linked()) position = written.link();
      return;
    }
    const int index = all.lists.find(written.slot());
    if (index < 0) return;
    e = all.lists.begin(index);
    end = all.lists.end(index);
    position = e < end ? all.lists.position(e) : -1;
  }
  __device__ void next() {
    if (all.stored != nullptr) {
      position = SlotRecord{all.stored[position]}.next();
    } else {
      position = ++e < end ? all.lists.position(e) : -1;
    }
  }
};

// A slot that one entry writes, at `position`; one thread's. Its reads from its token on passed its gate, and no other.
template <class T>
__device__ void one_entry(const Chunk<T>& c, const SlotRecord& record, int position) {
  const int t = c.by_writes(position);
  const float kappa = to_float(c.k_val[position]), eff = c.dk_eff[position], k_eff = c.k_eff[position];
  const float carry = c.dk_carry[position], ddecay = c.ddecay[record.index()];
  double dgate = 0, dweight = 0;
  for (SlotReads read(c.read_records, record); read.position >= 0; read.next()) {
    const int at = read.position, tr = c.by_reads(at);
    float dq = c.dq_eff[at];
    if (tr >= t) {
      const float grad = c.dqk[tr * c.chunk + t], q = to_float(c.q_val[at]);
      dgate += static_cast<double>(c.q_eff[at]) * dq;
      dweight += grad * q;
      dq = record.decay() * dq + grad * kappa;
    }
    c.dq_val[at] = dq;
  }
  c.dk_val[position] = static_cast<float>(static_cast<double>(record.decay() * eff) + carry + dweight);
  c.dx[position] = static_cast<float>(static_cast<double>(k_eff) * eff + dgate + ddecay);
}

__device__ inline double team_sum(double x) {
#pragma unroll
  for (int offset = kTeam / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
  return x;
}
// Of the lanes of the team before this one.
__device__ inline double team_sum_before(double x) {
  const int lane = threadIdx.x % kTeam;
#pragma unroll
  for (int offset = 1; offset < kTeam; offset *= 2) {
    const double y = __shfl_up_sync(kAll, x, offset, kTeam);
    if (lane >= offset) x += y;
  }
  x = __shfl_up_sync(kAll, x, 1, kTeam);
  return lane == 0 ? 0.0 : x;
}

// A slot that at most kTeam entries write, from `begin` of the list on: a team's, a lane an entry. All lanes of a warp
// come here, those of a team with one slot, or without (-1).
template <class T>
__device__ void few_entries(const Chunk<T>& c, const SlotRecord& record, int begin, int count) {
  const int lane = threadIdx.x % kTeam;
  const int position = record.slot() >= 0 && lane < count ? c.write.position(begin + lane) : -1;
  const bool valid = position >= 0;
  const int token = valid ? c.by_writes(position) : -1, before = __shfl_up_sync(kAll, token, 1, kTeam);
  // A slot decays once a token, by the gate of its first entry.
  const bool first = valid && (lane == 0 || before != token);
  const float gate = first ? c.gate_of(token, position) : 0.0f, kappa = valid ? to_float(c.k_val[position]) : 0.0f;
  const float eff = valid ? c.dk_eff[position] : 0.0f, carry = valid ? c.dk_carry[position] : 0.0f;
  const double through = valid ? static_cast<double>(c.k_eff[position]) * eff : 0.0;
  const double carried = valid ? static_cast<double>(c.k_carry[position]) * carry : 0.0;
  const int most = __reduce_max_sync(kAll, record.slot() >= 0 ? count : 0);

  // Entries of earlier tokens are carried through a gate to the chunk's end, those from its token on have read
  // through it.
  double since = 0, after = 0, dgate = 0, dweight = 0;
  for (int k = 0; k < most; ++k) {
    const int t = __shfl_sync(kAll, token, k, kTeam);
    const float x = __shfl_sync(kAll, gate, k, kTeam);
    const double read = __shfl_sync(kAll, through, k, kTeam), held = __shfl_sync(kAll, carried, k, kTeam);
    if (t < 0) continue;
    if (t <= token) {
      since += x;
    } else {
      after += x;
    }
    dgate += t >= token ? read : held;
  }
  // Pairs of a reader at token `t` of weight `weight` with the entries of tokens up to `last`. Returns the gradient
  // of the reader's weight.
  const auto pair_gradients = [&](const float* row, float weight, int t, int last) {
    double between = 0;
    for (int k = 0; k < most; ++k) {
      const int tk = __shfl_sync(kAll, token, k, kTeam);
      const float x = __shfl_sync(kAll, gate, k, kTeam);
      if (tk > token && tk <= t) between += x;
    }
    const bool on = valid && token <= last;
    const float grad = on ? row[token] * decayed(between) : 0.0f;
    if (on) dweight += grad * weight;
    const double passed = team_sum_before(on ? static_cast<double>(grad * weight) * kappa : 0.0);
    if (valid && token <= t) dgate += passed;
    return team_sum(on ? grad * kappa : 0.0f);
  };
  for (int k = 1; k < most; ++k) {
    const int t = __shfl_sync(kAll, token, k, kTeam);
    const double own = pair_gradients(c.da + max(t, 0) * c.chunk, __shfl_sync(kAll, kappa, k, kTeam), t, t - 1);
    if (lane == k) dweight += own;
  }
  SlotReads read(c.read_records, record);
  while (__any_sync(kAll, read.position >= 0)) {
    const int at = read.position, t = at >= 0 ? c.by_reads(at) : -1;
    const float q = at >= 0 ? to_float(c.q_val[at]) : 0.0f, dq = at >= 0 ? c.dq_eff[at] : 0.0f;
    const double own = pair_gradients(c.dqk + max(t, 0) * c.chunk, q, t, t);
    double passed = 0;  // the gates up to the read's token
    for (int k = 0; k < most; ++k) {
      const int tk = __shfl_sync(kAll, token, k, kTeam);
      const float x = __shfl_sync(kAll, gate, k, kTeam);
      if (tk >= 0 && tk <= t) passed += x;
    }
    if (at >= 0) {
      if (valid && token <= t) dgate += static_cast<double>(c.q_eff[at]) * dq;
      if (lane == 0) c.dq_val[at] = static_cast<float>(dq * decayed(passed) + own);
      read.next();
    }
  }
  if (!valid) return;
  c.dk_val[position] = static_cast<float>(static_cast<double>(decayed(since) * eff) + decayed(after) * carry + dweight);
  c.dx[position] = first ? static_cast<float>(dgate + c.ddecay[record.index()]) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) few_entries_kernel(const __grid_constant__ Params a) {
  const Chunk<T> c(a, blockIdx.x);
  const int lane = threadIdx.x & 31;
  const int start = static_cast<int>(blockIdx.y) * kThreads + threadIdx.x,
            step = static_cast<int>(gridDim.y) * kThreads;
  // Entries that no list names.
  for (int i = start; i < c.tokens * c.writes; i += step) {
    if (static_cast<unsigned>(c.k_idx[i]) >= static_cast<unsigned>(a.num_slots)) c.dk_val[i] = c.dx[i] = 0.0f;
  }
  for (int i = start; i < c.tokens * c.reads; i += step) {
    if (static_cast<unsigned>(c.q_idx[i]) >= static_cast<unsigned>(a.num_slots)) c.dq_val[i] = 0.0f;
  }
  // Reads of slots that the chunk does not write: their rows came undecayed from the bank.
  for (int j = start; j < c.read_records.count(); j += step) {
    const SlotRecord record = c.read_records.at(j);
    if (record.slot() < 0 || record.linked()) continue;
    if (c.read_records.stored == nullptr && c.write.find(record.slot()) >= 0) continue;
    c.read_records.for_reads(record, j, [&](int position, float) { c.dq_val[position] = c.dq_eff[position]; });
  }
  for (int j = start; j - lane < c.write_records.count(); j += step) {
    const SlotRecord record = c.write_records.at(j);
    if (record.slot() >= 0 && record.single()) one_entry(c, record, j);
    int begin = 0, count = 0;
    if (record.slot() >= 0 && !record.single()) {
      begin = c.write.begin(record.index());
      count = c.write.end(record.index()) - begin;
    }
    unsigned left = __ballot_sync(kAll, count > 0 && count <= kTeam);
    while (left != 0) {
      // A team takes the slot of the lane that is its own among those left.
      unsigned others = left;
      int from = -1;
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const int next = __ffs(others) - 1;
        if (lane / kTeam == team) from = next;
        others &= others - 1;
      }
      left = others;
      SlotRecord taken;
      taken.bits.x = __shfl_sync(kAll, record.bits.x, max(from, 0));
      taken.bits.y = __shfl_sync(kAll, record.bits.y, max(from, 0));
      taken.bits.z = __shfl_sync(kAll, record.bits.z, max(from, 0));
      taken.bits.w = __shfl_sync(kAll, record.bits.w, max(from, 0));
      if (from < 0) taken = SlotRecord::none();
      const int first = __shfl_sync(kAll, begin, max(from, 0)), size = __shfl_sync(kAll, count, max(from, 0));
      few_entries(c, taken, first, size);
    }
  }
}

// The tokens that write one slot, in order; one warp's.
struct SlotTokens {
  double *since, *after, *dgate, *dweight, *terms;  // [C]
  float *gate, *weight;                             // [C]
  int32_t* token;                                   // [C]
  // Whole 8-byte words, for the next warp's.
  __host__ __device__ static int64_t bytes(int64_t chunk) {
    return (chunk * static_cast<int64_t>(5 * sizeof(double) + 2 * sizeof(float) + sizeof(int32_t)) + 7) / 8 * 8;
  }

  __device__ SlotTokens(void* memory, int chunk) {
    since = static_cast<double*>(memory);
    after = since + chunk;
    dgate = after + chunk;
    dweight = dgate + chunk;
    terms = dweight + chunk;
    gate = reinterpret_cast<float*>(terms + chunk);
    weight = gate + chunk;
    token = reinterpret_cast<int32_t*>(weight + chunk);
  }
};

// Slot `i` of the written, of any number of entries; a warp's.
template <class T>
__device__ void many_entries(const Chunk<T>& c, const SlotTokens& slot, int i) {
  const int lane = threadIdx.x & 31, chunk = c.chunk;
  const SlotLists &write = c.write, &read = c.read;
  // Adds terms[0 .. last) of one reader, each to the gates after its own token up to `last`.
  const auto add_straddling = [&](int last) {
    __syncwarp();
    double run = 0;
    for (int low = 0; low < last; low += 32) {
      const int b = low + lane;
      const double sum = run + warp_prefix(b < last ? slot.terms[b] : 0.0);
      if (b < last) slot.dgate[b + 1] += sum;
      run = __shfl_sync(kAll, sum, 31);
    }
    __syncwarp();
  };
  // Pairs of a reader of weight `weight` with the tokens up to index `top`, which pass the gates after
  // their own, `between` of them already summed. Returns the gradient of the reader's weight.
  const auto pair_gradients = [&](const float* row, float weight, int top, double between) {
    double own = 0;
    for (; top >= 0; top -= 32) {
      const int b = top - lane;
      const double sum = warp_prefix(b >= 0 ? static_cast<double>(slot.gate[b]) : 0.0);
      double before = __shfl_up_sync(kAll, sum, 1);
      if (lane == 0) before = 0;
      if (b >= 0) {
        const float grad = row[slot.token[b]] * decayed(between + before);
        slot.dweight[b] += grad * weight;
        slot.terms[b] = static_cast<double>(grad * weight) * slot.weight[b];
        own += grad * slot.weight[b];
      }
      between += __shfl_sync(kAll, sum, 31);
    }
    return warp_sum(own);
  };
  const int begin = write.begin(i), end = write.end(i);
  const int r = write.slot(i) >= 0 ? read.find(write.slot(i)) : -1;
  // The slot's tokens: index, weights added up, and the terms of their own entries.
  int size = 0;
  for (int e0 = begin; e0 < end; e0 += 32) {
    const int e = e0 + lane;
    const int position = e < end ? write.position(e) : -1;
    const int t = position >= 0 ? c.by_writes(position) : -1;
    const int before = e > begin && e < end ? write.position(e - 1) : -1;
    const bool head = t >= 0 && (before < 0 || c.by_writes(before) != t);
    const unsigned heads = __ballot_sync(kAll, head);
    const int index = size + __popc(heads & ((1u << lane) - 1));
    if (head && index < chunk) {
      float weight = 0;
      double carried = 0, through = 0;
      for (int k = e; k < end; ++k) {
        const int at = write.position(k);
        if (at < 0 || c.by_writes(at) != t) break;
        weight += to_float(c.k_val[at]);
        carried += static_cast<double>(c.k_carry[at]) * c.dk_carry[at];
        through += static_cast<double>(c.k_eff[at]) * c.dk_eff[at];
      }
      slot.token[index] = t;
      slot.gate[index] = c.gate_of(t, position);
      slot.weight[index] = weight;
      slot.terms[index] = carried;
      slot.dweight[index] = through;
    }
    size = min(chunk, size + __popc(heads));
  }
  __syncwarp();
  if (lane == 0) {
    // Entries of earlier tokens are carried through a gate to the chunk's end, those from its token
    // on have read through it.
    double since = 0, carried = 0;
    for (int k = 0; k < size; ++k) {
      slot.since[k] = since += slot.gate[k];
      slot.dgate[k] = carried;
      carried += slot.terms[k];
    }
    double after = 0, through = 0;
    for (int k = size - 1; k >= 0; --k) {
      slot.after[k] = after;
      after += slot.gate[k];
      through += slot.dweight[k];
      slot.dgate[k] += through;
      slot.dweight[k] = 0;
    }
  }
  __syncwarp();
  for (int later = 1; later < size; ++later) {
    const double own =
        pair_gradients(c.da + slot.token[later] * chunk, slot.weight[later], later - 1, slot.gate[later]);
    if (lane == 0) slot.dweight[later] += own;
    add_straddling(later);
  }
  for (int e = r >= 0 ? read.begin(r) : 0; r >= 0 && e < read.end(r); ++e) {
    const int position = read.position(e);
    if (position < 0) continue;
    const int t = c.by_reads(position);
    int seen = 0;  // tokens that have written the slot when it is read
    for (int k0 = 0; k0 < size; k0 += 32) {
      seen += __popc(__ballot_sync(kAll, k0 + lane < size && slot.token[k0 + lane] <= t));
    }
    const double own = pair_gradients(c.dqk + t * chunk, to_float(c.q_val[position]), seen - 1, 0.0);
    if (lane == 0) {
      c.dq_val[position] =
          static_cast<float>(c.dq_eff[position] * (seen > 0 ? decayed(slot.since[seen - 1]) : 1.0f) + own);
    }
    if (seen > 0) {
      add_straddling(seen - 1);
      // The read's row passed every gate up to its token.
      const double term = static_cast<double>(c.q_eff[position]) * c.dq_eff[position];
      for (int k = lane; k < seen; k += 32) slot.dgate[k] += term;
      __syncwarp();
    }
  }
  __syncwarp();
  int heads_before = 0;
  for (int e0 = begin; e0 < end; e0 += 32) {
    const int e = e0 + lane;
    const int position = e < end ? write.position(e) : -1;
    const int t = position >= 0 ? c.by_writes(position) : -1;
    const int before = e > begin && e < end ? write.position(e - 1) : -1;
    const bool head = t >= 0 && (before < 0 || c.by_writes(before) != t);
    const unsigned heads = __ballot_sync(kAll, head);
    const int index = heads_before + __popc(heads & (kAll >> (31 - lane))) - 1;
    if (position >= 0 && index >= 0 && index < size) {
      const float eff = c.dk_eff[position], carry = c.dk_carry[position];
      c.dk_val[position] = static_cast<float>(static_cast<double>(decayed(slot.since[index]) * eff) +
                                              decayed(slot.after[index]) * carry + slot.dweight[index]);
      c.dx[position] = head ? static_cast<float>(slot.dgate[index] + c.ddecay[i]) : 0.0f;
    }
    heads_before += __popc(heads);
  }
  __syncwarp();
}

template <class T>
__global__ void __launch_bounds__(kThreads) many_entries_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Chunk<T> c(a, blockIdx.x);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, threads = static_cast<int>(blockDim.x);
  const SlotTokens slot(shared + warp * SlotTokens::bytes(c.chunk), c.chunk);
  // Mostly there are none: a warp looks at 32 x kEach slots at once.
  for (int i0 = warp * 32 * kEach; i0 < c.write.most; i0 += threads * kEach) {
    unsigned many[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int i = i0 + 32 * k + lane;
      const bool inside = i < c.write.most;
      many[k] = __ballot_sync(kAll, inside && c.write.end(i) - c.write.begin(i) > kTeam);
    }
#pragma unroll 1
    for (int k = 0; k < kEach; ++k) {
      for (unsigned left = many[k]; left != 0; left &= left - 1) many_entries(c, slot, i0 + 32 * k + __ffs(left) - 1);
    }
  }
  if (c.gates != 1) return;
  __syncthreads();
  for (int t = warp; t < c.tokens; t += threads / 32) {
    float sum = 0;
    for (int w = lane; w < c.writes; w += 32) sum += c.dx[t * c.writes + w];
    sum = warp_sum(sum);
    if (lane == 0) c.dg[t] = sum;
  }
}

}  // namespace

cudaError_t phase1_backward(const Backward& b, Launch where) {
  const Shape& s = b.shape;
  const Chunks& c = b.chunks;
  Params a = {};
  a.k_idx = b.in.k_idx;
  a.q_idx = b.in.q_idx;
  a.k_val = b.in.k_val;
  a.q_val = b.in.q_val;
  a.g = static_cast<const float*>(b.in.g);
  a.k_eff = static_cast<const float*>(c.k_eff);
  a.k_carry = static_cast<const float*>(c.k_carry);
  a.q_eff = static_cast<const float*>(c.q_eff);
  a.da = static_cast<const float*>(b.da);
  a.dqk = static_cast<const float*>(b.dqk);
  a.dk_eff = static_cast<const float*>(b.dk_eff);
  a.dk_carry = static_cast<const float*>(b.dk_carry);
  a.dq_eff = static_cast<const float*>(b.dq_eff);
  a.ddecay = static_cast<const float*>(b.ddecay);
  a.slots = c.slots;
  a.starts = c.starts;
  a.order = c.order;
  a.read_slots = c.read_slots;
  a.read_starts = c.read_starts;
  a.read_order = c.read_order;
  a.write_records = static_cast<const int4*>(b.write_records);
  a.read_records = static_cast<const int4*>(b.read_records);
  a.decay = static_cast<const float*>(c.decay);
  a.dk_val = static_cast<float*>(b.dk_val);
  a.dg = static_cast<float*>(b.dg);
  a.dq_val = static_cast<float*>(b.dq_val);
  a.dx = static_cast<float*>(b.dx);
  a.tokens = s.tokens;
  a.chunks = s.chunks();
  a.chunk = static_cast<int>(s.chunk);
  a.writes = static_cast<int>(s.writes);
  a.reads = static_cast<int>(s.reads);
  a.gates = static_cast<int>(s.gates);
  a.write_slots = static_cast<int>(s.write_slots);
  a.read_slots_most = static_cast<int>(s.read_slots);
  a.num_slots = static_cast<int>(s.slots);
  a.by_writes = Divider(s.writes);
  a.by_reads = Divider(s.reads);
  const auto few = b.dtype == DType::bf16 ? few_entries_kernel<bf16> : few_entries_kernel<float>;
  const auto many = b.dtype == DType::bf16 ? many_entries_kernel<bf16> : many_entries_kernel<float>;
  const int64_t chunks = s.streams * a.chunks, blocks = div_up(s.chunk * std::max(s.writes, s.reads), kThreads * kEach);
  const cudaError_t error =
      launch(few, dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(blocks)), kThreads, 0, where, a);
  if (error != cudaSuccess) return error;
  const auto shared_bytes = [&](int threads) { return static_cast<size_t>(threads / 32 * SlotTokens::bytes(s.chunk)); };
  const int threads = shared_bytes(kThreads) <= shared_limit() ? kThreads : kThreads / 2;
  return launch(many, dim3(static_cast<unsigned>(chunks)), threads, shared_bytes(threads), Launch{where.stream}, a);
}

}  // namespace sdm::gpu
