// The CPU kernels, as a table of functions for each bank dtype and instruction set.
//
// Each works on one chunk of one stream; those of Phase 2 on one range of columns, because columns
// never meet there. They only read and write through the structs of cuda/sdm.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sdm.h"

namespace sdm::cpu {

// A range of columns: one or more parts of `step` columns (the last of a row may be narrower). Sums over
// columns are kept apart part by part, so that they do not depend on how many parts a range takes together.
struct Columns {
  int64_t begin;
  int64_t end;
  int64_t part;  // index of the first part
  int64_t step;

  // Calls f(Columns) for each part.
  template <class F>
  inline __attribute__((always_inline)) void for_parts(F&& f) const {
    int64_t index = part;
    for (int64_t c = begin; c < end; c += step) f(Columns{c, c + step < end ? c + step : end, index++, step});
  }
};

struct Kernels {
  // Forward. `scratch` holds phase1_scratch_bytes.
  void (*phase1)(const Forward&, int64_t stream, int64_t chunk, void* scratch);
  void (*solve)(const Forward&, int64_t stream, int64_t chunk);
  void (*gather)(const Forward&, int64_t stream, int64_t chunk, Columns);
  void (*take_snapshot)(const Forward&, int64_t stream, int64_t chunk, Columns);
  void (*dual_matmul)(const Forward&, int64_t stream, int64_t chunk, Columns);
  void (*mover)(const Forward&, int64_t stream, int64_t chunk, Columns);
  // Backward. `scratch` of the movers holds mover_scratch_bytes.
  void (*gather_gradient)(const Backward&, int64_t stream, int64_t chunk, Columns);
  void (*du_matmul)(const Backward&, int64_t stream, int64_t chunk, Columns);
  void (*write_mover)(const Backward&, int64_t stream, int64_t chunk, Columns, void* scratch);
  void (*read_mover)(const Backward&, int64_t stream, int64_t chunk, Columns, void* scratch);
  void (*add_parts)(const Backward&, int64_t stream, int64_t chunk);
  void (*phase1_backward)(const Backward&, int64_t stream, int64_t chunk, void* scratch);
  // `scratch` holds decode_scratch_bytes.
  void (*decode)(const Decode&, int64_t stream, Columns, void* scratch);
  // Rows begin .. end. `scratch` holds topk_scratch_bytes.
  void (*topk)(const ProductKey&, int64_t begin, int64_t end, void* scratch);
  void (*topk_backward)(const ProductKeyBackward&, int64_t begin, int64_t end, void* scratch);
};

// The kernels for a bank dtype (and, in the backward, the dtype of its gradient) on this processor.
const Kernels& kernels(DType bank, DType grad);
inline const Kernels& kernels(DType bank) { return kernels(bank, bank); }

// The instruction set that `kernels` serves: "baseline", "avx2" or "avx512". The environment
// variable SDM_CPU_ISA asks for a lower one than the processor's best.
const char* isa_name();

int64_t snapshot_row_bytes(Quant, DType bank, int64_t width);
size_t phase1_scratch_bytes(const Shape&);
size_t mover_scratch_bytes(const Shape&);
size_t decode_scratch_bytes(const Shape&);
size_t topk_scratch_bytes(int64_t k, int64_t columns);

}  // namespace sdm::cpu
