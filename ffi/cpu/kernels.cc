// Instantiates the CPU kernels for one instruction set; compiled once for each.
#include "ffi/cpu/kernels.h"

#include "ffi/cpu/decode.h"
#include "ffi/cpu/gather.h"
#include "ffi/cpu/matmul.h"
#include "ffi/cpu/mover.h"
#include "ffi/cpu/phase1.h"
#include "ffi/cpu/product_key.h"
#include "ffi/cpu/solve.h"

namespace sdm::cpu::SDM_ISA {

// Adds the column ranges' sums into part 0, in their order.
template <class A>
void add_parts(const Backward& b, int64_t p, int64_t n) {
  const ChunkView view(b.shape, p, n);
  const Shape& s = b.shape;
  const auto add = [&](void* base, int64_t part, int64_t begin, int64_t count) {
    A* sum = at<A>(base, begin);
    for (int64_t q = 1; q < b.parts; ++q) {
      const A* other = at<A>(base, q * part + begin);
      for (int64_t i = 0; i < count; ++i) sum[i] += other[i];
    }
  };
  const int64_t square = s.chunk * s.chunk, chunks = s.streams * s.stored_chunks, tokens = s.streams * s.tokens;
  add(b.da, chunks * square, view.square(), square);
  add(b.dqk, chunks * square, view.square(), square);
  add(b.ddecay, chunks * s.write_slots, view.stored_chunk * s.write_slots, s.write_slots);
  add(b.dk_eff, tokens * s.writes, view.token * s.writes, view.tokens * s.writes);
  add(b.dk_carry, tokens * s.writes, view.token * s.writes, view.tokens * s.writes);
  add(b.dq_eff, tokens * s.reads, view.token * s.reads, view.tokens * s.reads);
  add(b.dbeta, tokens, view.token, view.tokens);
}

template <class T, class G>
constexpr Kernels table() {
  return {phase1<T>,         solve<T>,           gather<T>,    take_snapshot<T>,  dual_matmul<T>,
          mover<T>,          gather_gradient<G>, du_matmul<T>, write_mover<T, G>, read_mover<T, G>,
          add_parts<Acc<T>>, phase1_backward<T>, decode<T>,    topk<T>,           topk_backward<T>};
}

const Kernels& kernels(DType bank, DType grad) {
  static constexpr Kernels f32 = table<float, float>();
  static constexpr Kernels f64 = table<double, double>();
  static constexpr Kernels bf16_bf16 = table<bf16, bf16>();
  static constexpr Kernels bf16_f32 = table<bf16, float>();
  if (bank == DType::f64) return f64;
  if (bank == DType::f32) return f32;
  return grad == DType::f32 ? bf16_f32 : bf16_bf16;
}

}  // namespace sdm::cpu::SDM_ISA
