// Backward of Phase 1: gradients of the weights and gates from those of A, QK and the decayed weights
// (section 4 of the specification). One block a chunk. A slot that one entry writes is a thread's
// work; every other slot is a warp's, which keeps the slot's tokens in shared memory. Bound by latency: dependent
// look-ups in the lists.
//
// The gradient of a gate sums only the pairs that straddle it, and decays are exponentials of sums of
// only the gates in between.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;  // half where shared memory is short

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

template <class T>
__global__ void __launch_bounds__(kThreads, 4) phase1_backward_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, threads = static_cast<int>(blockDim.x);
  const int64_t stored = blockIdx.x, p = stored / a.chunks, n = stored % a.chunks;
  const int chunk = a.chunk, writes = a.writes, reads = a.reads;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(chunk), a.tokens - n * chunk));
  const int64_t token = p * a.tokens + n * chunk, entry0 = token * writes, read0 = token * reads;
  const T* k_val = static_cast<const T*>(a.k_val) + entry0;
  const T* q_val = static_cast<const T*>(a.q_val) + read0;
  const float* g = a.g + token * a.gates;
  const float *k_eff = a.k_eff + entry0, *k_carry = a.k_carry + entry0, *q_eff = a.q_eff + read0;
  const float *dk_eff = a.dk_eff + entry0, *dk_carry = a.dk_carry + entry0, *dq_eff = a.dq_eff + read0;
  const float *da = a.da + stored * chunk * chunk, *dqk = a.dqk + stored * chunk * chunk;
  const float* ddecay = a.ddecay + stored * a.write_slots;
  float *dk_val = a.dk_val + entry0, *dq_val = a.dq_val + read0;
  float* dx = a.gates == 1 ? a.dx + entry0 : a.dg + entry0;
  const SlotLists write{a.slots + stored * a.write_slots,
                        a.starts + stored * (a.write_slots + 1),
                        a.order + stored * chunk * writes,
                        a.write_slots,
                        tokens * writes,
                        a.num_slots};
  const SlotLists read{a.read_slots + stored * a.read_slots_most,
                       a.read_starts + stored * (a.read_slots_most + 1),
                       a.read_order + stored * chunk * reads,
                       a.read_slots_most,
                       tokens * reads,
                       a.num_slots};
  const auto gate_of = [&](int t, int position) { return a.gates == 1 ? g[t] : g[position]; };
  const auto decayed = [](double x) { return expf(static_cast<float>(x)); };

  const SlotRecords write_records{a.write_records == nullptr ? nullptr : a.write_records + stored * chunk * writes,
                                  write, k_eff, a.decay + stored * a.write_slots};
  const SlotRecords read_records{a.read_records == nullptr ? nullptr : a.read_records + stored * chunk * reads, read,
                                 q_eff, nullptr};

  // Entries that no list names.
  for (int i = threadIdx.x; i < tokens * writes; i += threads) {
    if (static_cast<unsigned>(a.k_idx[entry0 + i]) >= static_cast<unsigned>(a.num_slots)) dk_val[i] = dx[i] = 0.0f;
  }
  for (int i = threadIdx.x; i < tokens * reads; i += threads) {
    if (static_cast<unsigned>(a.q_idx[read0 + i]) >= static_cast<unsigned>(a.num_slots)) dq_val[i] = 0.0f;
  }
  // Reads of slots that the chunk does not write: their rows came undecayed from the bank.
  for (int j = threadIdx.x; j < read_records.count(); j += threads) {
    const SlotRecord record = read_records.at(j);
    if (record.slot() < 0 || record.linked()) continue;
    if (read_records.stored == nullptr && write.find(record.slot()) >= 0) continue;
    for (int e = read.begin(record.index()); e < read.end(record.index()); ++e) {
      const int position = read.position(e);
      if (position >= 0) dq_val[position] = dq_eff[position];
    }
  }

  const SlotTokens slot(shared + warp * SlotTokens::bytes(chunk), chunk);
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

  for (int j0 = warp * 32; j0 < write_records.count(); j0 += threads) {
    const SlotRecord record = write_records.at(j0 + lane);
    const int mine = record.slot();
    int reader = -1;
    if (mine >= 0 && record.linked()) reader = read_records.at(record.link()).index();
    if (mine >= 0 && write_records.stored == nullptr) reader = read.find(mine);
    const bool simple = mine < 0 || record.single();
    if (mine >= 0 && simple) {
      // One entry: its reads from its token on passed its gate, and no other.
      const int position = j0 + lane, t = a.by_writes(position);
      const float kappa = to_float(k_val[position]);
      double dgate = 0, dweight = 0;
      for (int e = reader >= 0 ? read.begin(reader) : 0; reader >= 0 && e < read.end(reader); ++e) {
        const int at = read.position(e);
        if (at < 0) continue;
        const int tr = a.by_reads(at);
        float dq = dq_eff[at];
        if (tr >= t) {
          const float grad = dqk[tr * chunk + t], q = to_float(q_val[at]);
          dgate += static_cast<double>(q_eff[at]) * dq;
          dweight += grad * q;
          dq = record.decay() * dq + grad * kappa;
        }
        dq_val[at] = dq;
      }
      const float eff = dk_eff[position];
      dk_val[position] = static_cast<float>(static_cast<double>(record.decay() * eff) + dk_carry[position] + dweight);
      dx[position] = static_cast<float>(static_cast<double>(k_eff[position]) * eff + dgate + ddecay[record.index()]);
    }
    unsigned left = __ballot_sync(kAll, !simple);
    for (; left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1, i = __shfl_sync(kAll, record.index(), from);
      const int begin = write.begin(i), end = write.end(i);
      const int r = __shfl_sync(kAll, reader, from);
      // The slot's tokens: index, weights added up, and the terms of their own entries.
      int size = 0;
      for (int e0 = begin; e0 < end; e0 += 32) {
        const int e = e0 + lane;
        const int position = e < end ? write.position(e) : -1;
        const int t = position >= 0 ? a.by_writes(position) : -1;
        const int before = e > begin && e < end ? write.position(e - 1) : -1;
        const bool head = t >= 0 && (before < 0 || a.by_writes(before) != t);
        const unsigned heads = __ballot_sync(kAll, head);
        const int index = size + __popc(heads & ((1u << lane) - 1));
        if (head && index < chunk) {
          float weight = 0;
          double carried = 0, through = 0;
          for (int k = e; k < end; ++k) {
            const int at = write.position(k);
            if (at < 0 || a.by_writes(at) != t) break;
            weight += to_float(k_val[at]);
            carried += static_cast<double>(k_carry[at]) * dk_carry[at];
            through += static_cast<double>(k_eff[at]) * dk_eff[at];
          }
          slot.token[index] = t;
          slot.gate[index] = gate_of(t, position);
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
            pair_gradients(da + slot.token[later] * chunk, slot.weight[later], later - 1, slot.gate[later]);
        if (lane == 0) slot.dweight[later] += own;
        add_straddling(later);
      }
      for (int e = r >= 0 ? read.begin(r) : 0; r >= 0 && e < read.end(r); ++e) {
        const int position = read.position(e);
        if (position < 0) continue;
        const int t = a.by_reads(position);
        int seen = 0;  // tokens that have written the slot when it is read
        for (int k0 = 0; k0 < size; k0 += 32) {
          seen += __popc(__ballot_sync(kAll, k0 + lane < size && slot.token[k0 + lane] <= t));
        }
        const double own = pair_gradients(dqk + t * chunk, to_float(q_val[position]), seen - 1, 0.0);
        if (lane == 0) {
          dq_val[position] =
              static_cast<float>(dq_eff[position] * (seen > 0 ? decayed(slot.since[seen - 1]) : 1.0f) + own);
        }
        if (seen > 0) {
          add_straddling(seen - 1);
          // The read's row passed every gate up to its token.
          const double term = static_cast<double>(q_eff[position]) * dq_eff[position];
          for (int k = lane; k < seen; k += 32) slot.dgate[k] += term;
          __syncwarp();
        }
      }
      __syncwarp();
      int heads_before = 0;
      for (int e0 = begin; e0 < end; e0 += 32) {
        const int e = e0 + lane;
        const int position = e < end ? write.position(e) : -1;
        const int t = position >= 0 ? a.by_writes(position) : -1;
        const int before = e > begin && e < end ? write.position(e - 1) : -1;
        const bool head = t >= 0 && (before < 0 || a.by_writes(before) != t);
        const unsigned heads = __ballot_sync(kAll, head);
        const int index = heads_before + __popc(heads & (kAll >> (31 - lane))) - 1;
        if (position >= 0 && index >= 0 && index < size) {
          const float eff = dk_eff[position], carry = dk_carry[position];
          dk_val[position] = static_cast<float>(static_cast<double>(decayed(slot.since[index]) * eff) +
                                                decayed(slot.after[index]) * carry + slot.dweight[index]);
          dx[position] = head ? static_cast<float>(slot.dgate[index] + ddecay[i]) : 0.0f;
        }
        heads_before += __popc(heads);
      }
      __syncwarp();
    }
  }
  if (a.gates != 1) return;
  __syncthreads();
  for (int t = warp; t < tokens; t += threads / 32) {
    float sum = 0;
    for (int w = lane; w < writes; w += 32) sum += dx[t * writes + w];
    sum = warp_sum(sum);
    if (lane == 0) a.dg[token + t] = sum;
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
  const auto kernel = b.dtype == DType::bf16 ? phase1_backward_kernel<bf16> : phase1_backward_kernel<float>;
  const auto shared_bytes = [&](int threads) { return static_cast<size_t>(threads / 32 * SlotTokens::bytes(s.chunk)); };
  const int threads = shared_bytes(kThreads) <= shared_limit() ? kThreads : kThreads / 2;
  return launch(kernel, dim3(s.streams * a.chunks), threads, shared_bytes(threads), where, a);
}

}  // namespace sdm::gpu
