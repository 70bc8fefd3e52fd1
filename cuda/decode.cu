// Decode: the recurrence for one token a stream (section 1 of the specification). A block takes a slice
// of 64 columns of one stream and holds all rows of it in registers: two dependent memory accesses, ids
// then rows. Bound by their latency, then by the W + R rows read and the W rows written.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kMost = 256;  // entries of a token

struct Params {
  void* bank;
  const int32_t *k_idx, *q_idx;
  const void *k_val, *q_val, *v;
  const float *beta, *g;
  void* y;
  int64_t width, bank_stride;
  int slices, writes, reads, gates, streams_per_bank, num_slots;
};

template <class T, int V>
__global__ void __launch_bounds__(kThreads) decode_kernel(const __grid_constant__ Params a) {
  using Lanes = SliceLanes<V>;
  constexpr int kTeams = kThreads / Lanes::lanes;
  constexpr int kHeld = 4;  // rows that a team loads at once, and keeps where these are all
  __shared__ int32_t write_id[kMost], read_id[kMost];
  __shared__ int32_t first_id[kMost];  // the slot at its first entry, else -1
  __shared__ int32_t readers[kMost];   // reads of the slot at its first entry
  __shared__ float decay[kMost], weight[kMost], read_weight[kMost];
  __shared__ float kappa[kMost], q[kMost];  // of single entries
  __shared__ float partial[kTeams][kSlice], delta[kSlice];
  __shared__ int8_t seen[kMost];  // reads of written slots
  __shared__ int any;
  const int slice = blockIdx.x % a.slices;
  const int64_t p = blockIdx.x / a.slices;
  const int lane = threadIdx.x % Lanes::lanes, team = threadIdx.x / Lanes::lanes;
  const int64_t column0 = static_cast<int64_t>(slice) * kSlice;
  const int columns = static_cast<int>(min(static_cast<int64_t>(kSlice), a.width - column0));
  T* bank = static_cast<T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + column0;
  const T* k_val = static_cast<const T*>(a.k_val) + p * a.writes;
  const T* q_val = static_cast<const T*>(a.q_val) + p * a.reads;
  const float* g = a.g + p * a.gates;
  using Rows = Packed<T, V>[kHeld][Lanes::steps];
  // Rows team + k * kTeams of a batch, from index `base` on.
  const auto fetch = [&](Rows& rows, const int32_t* ids, int count, int base) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int e = base + team + k * kTeams;
      const int id = e < count ? ids[e] : -1;
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        rows[k][s] = {};
        if (id >= 0 && c < columns) rows[k][s] = load_row<T, V>(bank + id * a.width + c);
      }
    }
  };
  // Adds the teams' sums, in their order.
  const auto add_teams = [&](const float (&sum)[Lanes::steps][V]) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
      for (int j = 0; j < V; ++j) partial[team][Lanes::column(lane, s) + j] = sum[s][j];
    }
    __syncthreads();
    float total = 0;
    if (threadIdx.x < kSlice) {
#pragma unroll
      for (int k = 0; k < kTeams; ++k) total += partial[k][threadIdx.x];
    }
    return total;
  };

  if (threadIdx.x == 0) any = 0;
  wait_for_previous();
  float v = 0, beta = 0;
  if (threadIdx.x < columns) {
    v = to_float(static_cast<const T*>(a.v)[p * a.width + column0 + threadIdx.x]);
    beta = a.beta[p];
  }
  const auto id_or_none = [&](int id) {
    return static_cast<unsigned>(id) < static_cast<unsigned>(a.num_slots) ? id : -1;
  };
  for (int w = threadIdx.x; w < a.writes; w += kThreads) {
    write_id[w] = id_or_none(a.k_idx[p * a.writes + w]);
    kappa[w] = to_float(k_val[w]);
    decay[w] = expf(g[a.gates == 1 ? 0 : w]);
  }
  for (int r = threadIdx.x; r < a.reads; r += kThreads) {
    read_id[r] = id_or_none(a.q_idx[p * a.reads + r]);
    q[r] = to_float(q_val[r]);
    seen[r] = 0;
  }
  __syncthreads();
  // Rows set out while the entries are matched; those of repeated entries in vain.
  Rows written, read;
  fetch(written, write_id, a.writes, 0);
  fetch(read, read_id, a.reads, 0);
  // The first entry of a slot takes the weights of all its writes, and of all reads that see them: a warp an
  // entry, its lanes over the others.
  const int in_warp = threadIdx.x & 31;
  for (int w = threadIdx.x / 32; w < a.writes; w += kThreads / 32) {
    const int id = write_id[w];
    bool first = id >= 0;
    float sum = 0, read_sum = 0;
    int count = 0;
    for (int e0 = 0; id >= 0 && e0 < a.writes; e0 += 32) {
      const int e = e0 + in_warp;
      const bool same = e < a.writes && write_id[e] == id;
      if (__ballot_sync(0xffffffffu, same && e < w)) {
        first = false;
        break;
      }
      if (same) sum += kappa[e];
    }
    if (first) {
      for (int r = in_warp; r < a.reads; r += 32) {
        if (read_id[r] != id) continue;
        read_sum += q[r];
        ++count;
        seen[r] = 1;
      }
      sum = warp_sum(sum);
      read_sum = warp_sum(read_sum);
      count = __reduce_add_sync(0xffffffffu, count);
    }
    if (in_warp == 0) {
      if (id >= 0) any = 1;
      weight[w] = sum;
      read_weight[w] = read_sum;
      readers[w] = count;
      first_id[w] = first ? id : -1;
    }
  }
  __syncthreads();

  const int batch = kHeld * kTeams;
  float sum[Lanes::steps][V] = {};
  for (int base = 0; base < a.writes; base += batch) {
    if (base > 0) fetch(written, first_id, a.writes, base);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int w = base + team + k * kTeams;
      if (w >= a.writes || first_id[w] < 0) continue;
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        float x[V];
        unpack<T, V>(written[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[s][j] += weight[w] * (decay[w] * x[j]);
      }
    }
  }
  const float retrieved = add_teams(sum);
  if (threadIdx.x < kSlice) {
    const int c = threadIdx.x;
    float value = 0;
    if (any && c < columns) value = beta * (v - retrieved);
    delta[c] = value;
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < Lanes::steps; ++s) {
#pragma unroll
    for (int j = 0; j < V; ++j) sum[s][j] = 0;
  }
  for (int base = 0; base < a.writes; base += batch) {
    if (a.writes > batch) fetch(written, first_id, a.writes, base);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int w = base + team + k * kTeams;
      if (w >= a.writes || first_id[w] < 0) continue;
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        const int c = Lanes::column(lane, s);
        float x[V];
        unpack<T, V>(written[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = decay[w] * x[j] + weight[w] * delta[c + j];
        const Packed<T, V> moved = pack<T, V>(x);
        if (c < columns) store_packed<T, V>(bank + first_id[w] * a.width + c, moved);
        if (readers[w] > 0) {
          unpack<T, V>(moved, x);
#pragma unroll
          for (int j = 0; j < V; ++j) sum[s][j] += read_weight[w] * x[j];
        }
      }
    }
  }
  for (int base = 0; base < a.reads; base += batch) {
    if (base > 0) fetch(read, read_id, a.reads, base);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int r = base + team + k * kTeams;
      if (r >= a.reads || read_id[r] < 0 || seen[r]) continue;
      const float weight = q[r];
#pragma unroll
      for (int s = 0; s < Lanes::steps; ++s) {
        float x[V];
        unpack<T, V>(read[k][s], x);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[s][j] += weight * x[j];
      }
    }
  }
  const float y = add_teams(sum);
  let_next_start();
  if (threadIdx.x < columns) from_float(static_cast<T*>(a.y) + p * a.width + column0 + threadIdx.x, y);
}

}  // namespace

cudaError_t decode(const Decode& d, Launch where) {
  const Shape& s = d.shape;
  const Params params{d.bank,
                      d.in.k_idx,
                      d.in.q_idx,
                      d.in.k_val,
                      d.in.q_val,
                      d.in.v,
                      static_cast<const float*>(d.in.beta),
                      static_cast<const float*>(d.in.g),
                      d.y,
                      s.width,
                      s.slots * s.width,
                      static_cast<int>(div_up(s.width, kSlice)),
                      static_cast<int>(s.writes),
                      static_cast<int>(s.reads),
                      static_cast<int>(s.gates),
                      static_cast<int>(s.streams_per_bank),
                      static_cast<int>(s.slots)};
  return for_rows(d.dtype, s.width, [&](auto type, auto v) {
    return launch(decode_kernel<decltype(type), decltype(v)::value>, dim3(s.streams * params.slices), kThreads, 0,
                  where, params);
  });
}

}  // namespace sdm::gpu
