// Gather: weighted sums of the bank rows that a chunk's tokens name, and of the gradient's rows
// (sections 3 and 4 of the specification). One to eight warps a token and kind of entry (geometry.h);
// every lane has four 16-byte loads in flight. Moves W (R) rows of each token once; bound by memory.
#include "cuda/common/launch.cuh"
#include "cuda/geometry.h"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kInFlight = 4;

struct Kind {
  const int32_t* ids;
  const float* weights;
  float* out;  // or null
  // Where v is given: out = v - sum where `written`, else 0, and scaled = beta out.
  const void* v;      // [P, T, D] bank dtype
  const float* beta;  // [P, T]
  const int32_t* written;
  float* scaled;           // [P, C, D]
  int64_t out_stride;      // from stream to stream
  int64_t weights_stride;  // the same, in tokens
  int entries;
};

struct Params {
  const void* rows;
  Kind kind[2];
  int64_t width, tokens, stored_tokens, bank_stride, chunk_stride;
  int64_t begin;  // first column
  int64_t first_stream;
  int columns, num_slots;
  unsigned slices, kinds, chunk_tokens, streams_per_bank, warps_per_item, items;
};

// Four blocks a multiprocessor: three and five were slower (NOTES.md).
template <class T, int V, int Lanes>
__global__ void __launch_bounds__(kThreads, 4) gather_kernel(const __grid_constant__ Params a) {
  constexpr int kRows = 32 / Lanes;      // a warp loads at once
  constexpr int kLookedUp = 32 / kRows;  // loads
  __shared__ float partial[kWarps][Lanes * V];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int member = static_cast<int>(warp % a.warps_per_item);
  const unsigned item = blockIdx.x * (kWarps / a.warps_per_item) + warp / a.warps_per_item;
  const bool active = item < a.items;
  // Items: slice by slice of columns, kind by kind, token by token, stream by stream.
  const int slice = static_cast<int>(item % a.slices);
  const unsigned rest = item / a.slices;
  const Kind& kind = a.kind[a.kinds == 2 ? rest % 2 : 0];
  const unsigned row = a.kinds == 2 ? rest / 2 : rest;
  const int64_t p = a.first_stream + row / a.chunk_tokens;
  const int t = static_cast<int>(row % a.chunk_tokens);
  const int sub = lane / Lanes, offset = slice * Lanes * V + lane % Lanes * V;
  const bool inside = active && offset < a.columns;
  const int64_t column = a.begin + offset;
  const T* rows = static_cast<const T*>(a.rows) + p / a.streams_per_bank * a.bank_stride + column;
  const int32_t* ids = kind.ids + (p * a.tokens + t) * kind.entries;
  const float* weights = kind.weights + (p * kind.weights_stride + t) * kind.entries;

  // v, ids and weights do not change from step to step. v waits in the second-level cache, not in registers.
  if (kind.v != nullptr && inside) {
    const T* v = static_cast<const T*>(kind.v) + (p * a.tokens + t) * a.width + column;
    prefetch_row(v);
  }
  // A lane has the id and the weight of one of the warp's next 32 entries. Those of an item alternate between its
  // warps, a load at a time.
  int id_ahead;
  float weight_ahead;
  const int warp_rows = static_cast<int>(a.warps_per_item) * kRows;
  const int loads = (kind.entries + warp_rows - 1) / warp_rows;
  const auto look_up = [&](int done) {
    const int e = (done + lane / kRows) * warp_rows + member * kRows + lane % kRows;
    id_ahead = -1;
    weight_ahead = 0.0f;
    if (active && e < kind.entries) {
      id_ahead = ids[e];
      weight_ahead = weights[e];
    }
    if (static_cast<unsigned>(id_ahead) >= static_cast<unsigned>(a.num_slots)) {
      id_ahead = -1;
      weight_ahead = 0.0f;
    }
  };
  float acc[V] = {};
  look_up(0);
  wait_for_previous();
  // Not before the wait: what starts now reads rows that the kernel before this one wrote.
  let_next_start();
  for (int done = 0; done < loads; done += kLookedUp) {
    if (done > 0) look_up(done);
    const int count = min(loads - done, kLookedUp);
    Packed<T, V> packed[kInFlight];
    const auto issue = [&](int j, Packed<T, V>& to) {
      const int id = __shfl_sync(0xffffffffu, id_ahead, j * kRows + sub);
      to = {};
      if (id >= 0 && inside) to = load_row<T, V>(rows + id * a.width);
    };
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (k < count) issue(k, packed[k]);
    }
    for (int j = 0; j < count; j += kInFlight) {
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        if (j + k >= count) break;
        const float weight = __shfl_sync(0xffffffffu, weight_ahead, (j + k) * kRows + sub);
        float x[V];
        unpack<T, V>(packed[k], x);
#pragma unroll
        for (int i = 0; i < V; ++i) acc[i] += weight * x[i];
        if (j + k + kInFlight < count) issue(j + k + kInFlight, packed[k]);
      }
    }
  }
#pragma unroll
  for (int o = Lanes; o < 32; o *= 2) {
#pragma unroll
    for (int i = 0; i < V; ++i) acc[i] += __shfl_xor_sync(0xffffffffu, acc[i], o);
  }
  if (a.warps_per_item > 1) {
    if (lane < Lanes) {
#pragma unroll
      for (int i = 0; i < V; ++i) partial[warp][i * Lanes + lane] = acc[i];
    }
    __syncthreads();
    if (member != 0) return;
    for (unsigned m = 1; m < a.warps_per_item; ++m) {
#pragma unroll
      for (int i = 0; i < V; ++i) acc[i] += partial[warp + m][i * Lanes + lane % Lanes];
    }
  }
  if (!inside || lane >= Lanes) return;
  const int64_t at = t * a.width + column;
  if (kind.v != nullptr) {
    float x[V] = {}, scaled[V];
    const bool written = kind.written[p * a.stored_tokens + t] > 0;
    const float beta = written ? kind.beta[p * a.tokens + t] : 0.0f;
    if (written) load<T, V>(static_cast<const T*>(kind.v) + p * a.tokens * a.width + at, x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      acc[i] = written ? x[i] - acc[i] : 0.0f;
      scaled[i] = written ? beta * acc[i] : 0.0f;
    }
    store<float, V>(kind.scaled + p * a.chunk_stride + at, scaled);
  }
  if (kind.out != nullptr) store<float, V>(kind.out + p * kind.out_stride + at, acc);
}

template <class T, int V>
cudaError_t run(const Shape& s, Params a, int64_t streams, Launch where) {
  const auto with_lanes = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    a.slices = static_cast<unsigned>(div_up(a.columns, kLanes * V));
    a.items = static_cast<unsigned>(streams * a.chunk_tokens * a.kinds * a.slices);
    const int most = std::max(a.kind[0].entries, a.kinds == 2 ? a.kind[1].entries : 0);
    a.warps_per_item = gather_warps(most, 32 / kLanes * kInFlight, s.streams * s.chunk * div_up(s.width, kLanes * V));
    return launch(gather_kernel<T, V, kLanes>, dim3(div_up(a.items, kWarps / a.warps_per_item)), kThreads, 0, where, a);
  };
  if (V == 1 || a.columns > 16 * V) return with_lanes(std::integral_constant<int, 32>{});
  if (a.columns > 8 * V) return with_lanes(std::integral_constant<int, 16>{});
  return with_lanes(std::integral_constant<int, 8>{});
}

Params common(const Shape& s, const void* rows, int64_t n, Range range) {
  Params a = {};
  a.first_stream = range.first_stream;
  a.rows = rows;
  a.width = s.width;
  a.tokens = s.tokens;
  a.stored_tokens = s.stored_tokens;
  a.bank_stride = s.slots * s.width;
  a.chunk_stride = s.chunk * s.width;
  a.begin = range.begin;
  a.columns = static_cast<int>(range.end - range.begin);
  a.chunk_tokens = static_cast<unsigned>(s.chunk_tokens(n));
  a.streams_per_bank = static_cast<unsigned>(s.streams_per_bank);
  a.num_slots = static_cast<int>(s.slots);
  return a;
}

}  // namespace

cudaError_t gather(const Forward& f, int64_t n, Range range, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  Params a = common(s, f.bank, n, range);
  a.kinds = 2;
  Kind& write = a.kind[0];
  write.ids = f.in.k_idx + c.token * s.writes;
  write.weights = at<float>(f.chunks.k_eff, c.stored_token * s.writes);
  write.weights_stride = s.stored_tokens;
  write.entries = static_cast<int>(s.writes);
  if (f.retrieved != nullptr) {
    write.out = static_cast<float*>(f.retrieved);
    write.out_stride = s.chunk * s.width;
  } else {
    write.out = at<float>(f.error, f.row_offset(n));
    write.out_stride = f.row_stride();
    write.beta = at<float>(f.in.beta, c.token);
    write.scaled = static_cast<float*>(f.u);
    write.v = f.dtype == DType::bf16 ? static_cast<const void*>(at<bf16>(f.in.v, c.token * s.width))
                                     : static_cast<const void*>(at<float>(f.in.v, c.token * s.width));
    write.written = f.chunks.writes + c.stored_token;
  }
  Kind& read = a.kind[1];
  read.ids = f.in.q_idx + c.token * s.reads;
  read.weights = at<float>(f.chunks.q_eff, c.stored_token * s.reads);
  read.weights_stride = s.stored_tokens;
  read.entries = static_cast<int>(s.reads);
  read.out = static_cast<float*>(f.inter);
  read.out_stride = s.chunk * s.width;
  return for_rows(f.dtype, s.width, [&](auto type, auto v) {
    return run<decltype(type), decltype(v)::value>(s, a, range.streams, where);
  });
}

cudaError_t gather_gradient(const Backward& b, int64_t n, Range range, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  Params a = common(s, b.d_bank, n, range);
  a.kinds = 1;
  Kind& write = a.kind[0];
  write.ids = b.in.k_idx + c.token * s.writes;
  write.weights = at<float>(b.chunks.k_carry, c.stored_token * s.writes);
  write.weights_stride = s.stored_tokens;
  write.entries = static_cast<int>(s.writes);
  write.out = static_cast<float*>(b.carried);
  write.out_stride = s.chunk * s.width;
  return for_rows(b.grad_dtype, s.width, [&](auto type, auto v) {
    return run<decltype(type), decltype(v)::value>(s, a, range.streams, where);
  });
}

}  // namespace sdm::gpu
