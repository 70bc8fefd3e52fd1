// The interface of the kernels: sizes, the arrays of one call, and the launchers of the CUDA core.
//
// Nothing here knows XLA, Python or JAX. The CPU kernels (ffi/cpu) read the same structs, so that a
// custom call is declared and checked once for both. Symbols are those of section 3 of the
// specification: P streams, T tokens, S slots, D columns, W writes and R reads a token, C tokens a
// chunk, N chunks, U (V) the most distinct slots that a chunk can write (read).
#pragma once

#include <cstdint>

namespace sdm {

enum class DType : int { f32, bf16, f64 };
enum class Quant : int { none, bf16, fp8, int4 };

struct Shape {
  int64_t streams = 0;           // P
  int64_t streams_per_bank = 1;  // more than 1 only for a shared bank
  int64_t tokens = 0;            // T
  int64_t slots = 0;             // S
  int64_t width = 0;             // D
  int64_t writes = 0;            // W
  int64_t reads = 0;             // R
  int64_t gates = 0;             // 1 or W
  int64_t chunk = 0;             // C
  int64_t write_slots = 0;       // U
  int64_t read_slots = 0;        // V
  // Arrays with an axis of chunks (or of tokens, marked "stored") hold the chunks
  // first_chunk .. first_chunk + stored_chunks of every stream: all of them, or one slab.
  int64_t first_chunk = 0;
  int64_t stored_chunks = 0;
  int64_t stored_tokens = 0;

  int64_t chunks() const { return (tokens + chunk - 1) / chunk; }  // N
  int64_t chunk_tokens(int64_t n) const {
    const int64_t left = tokens - n * chunk;
    return left < chunk ? left : chunk;
  }
};

// Results of Phase 1. `acc` is float, or double for a float64 bank.
struct Chunks {
  void* a = nullptr;               // [P, N, C, C] acc, strictly lower triangular
  void* qk = nullptr;              // [P, N, C, C] acc, lower triangular
  void* k_eff = nullptr;           // [P, T stored, W] acc
  void* k_carry = nullptr;         // [P, T stored, W] acc
  void* q_eff = nullptr;           // [P, T stored, R] acc
  int32_t* slots = nullptr;        // [P, N, U] distinct slots written, ascending, then -1
  int32_t* starts = nullptr;       // [P, N, U + 1] where a slot's entries start in `order`
  int32_t* order = nullptr;        // [P, N, C * W] positions t * W + w by slot, then token, then w; then -1
  void* decay = nullptr;           // [P, N, U] acc
  int32_t* read_slots = nullptr;   // [P, N, V]
  int32_t* read_starts = nullptr;  // [P, N, V + 1]
  int32_t* read_order = nullptr;   // [P, N, C * R]
  int32_t* writes = nullptr;       // [P, T stored] valid write entries of a token
};

struct Inputs {
  const int32_t* k_idx = nullptr;  // [P, T, W]
  const void* k_val = nullptr;     // [P, T, W] bank dtype
  const void* v = nullptr;         // [P, T, D] bank dtype
  const void* beta = nullptr;      // [P, T] acc
  const void* g = nullptr;         // [P, T, gates] acc
  const int32_t* q_idx = nullptr;  // [P, T, R]
  const void* q_val = nullptr;     // [P, T, R] bank dtype
};

struct Forward {
  Shape shape;
  DType dtype = DType::f32;  // of the bank
  Quant quant = Quant::none;
  Inputs in;
  Chunks chunks;
  void* bank = nullptr;       // [P / streams_per_bank, S, D], updated in place
  void* x = nullptr;          // [P, N, C, C] acc
  void* qx = nullptr;         // [P, N, C, C] acc
  void* retrieved = nullptr;  // [P, C, D] acc, of one chunk
  void* u = nullptr;          // [P, C, D] acc, of one chunk: beta * error; may be `retrieved`
  void* inter = nullptr;      // [P, C, D] acc, of one chunk
  void* error = nullptr;      // [P, T stored, D] acc: v - retrieved
  void* delta = nullptr;      // [P, T stored, D] acc
  void* y = nullptr;          // [P, T, D] bank dtype
  void* snapshot = nullptr;   // [P, N, U, row] rows before the chunk; null: none is taken
  float* scale = nullptr;     // [P, N, U] in the modes with scales
  // The CUDA core's whole calls have no `retrieved`: the gather makes `error` and `u`. Where nothing is
  // saved, `error` is null and `delta` holds one chunk, [P, C, D].
  bool one_chunk_rows = false;
  void* records = nullptr;  // [P, N, C * W, 4] int32, 16 bytes of each written slot for the mover

  // Where chunk n's rows of `error` and `delta` begin, and the step from stream to stream.
  int64_t row_offset(int64_t n) const {
    return one_chunk_rows ? 0 : (n - shape.first_chunk) * shape.chunk * shape.width;
  }
  int64_t row_stride() const { return (one_chunk_rows ? shape.chunk : shape.stored_tokens) * shape.width; }
};

struct Backward {
  Shape shape;
  DType dtype = DType::f32;       // of the bank
  DType grad_dtype = DType::f32;  // of d_bank
  Quant quant = Quant::none;
  Inputs in;
  Chunks chunks;
  void* bank = nullptr;            // [P / streams_per_bank, S, D], restored in place
  void* d_bank = nullptr;          // the same shape, in place
  const void* x = nullptr;         // [P, N, C, C] acc
  const void* error = nullptr;     // [P, T, D] acc
  const void* delta = nullptr;     // [P, T, D] acc
  const void* snapshot = nullptr;  // [P, N, U, row]
  const float* scale = nullptr;    // [P, N, U]
  const void* dy = nullptr;        // [P, T, D] bank dtype
  void* carried = nullptr;         // [P, C, D] acc, of one chunk: sums of gradient rows
  void* dv = nullptr;              // [P, T, D] acc
  // Of the CUDA core: QK X, and 16-byte records of the written and of the read slots.
  void* qx = nullptr;             // [P, N, C, C] acc
  void* write_records = nullptr;  // [P, N, C * W, 4] int32
  void* read_records = nullptr;   // [P, N, C * R, 4] int32
  // Sums over the columns. Each of the `parts` column ranges has its own copy; part 0 receives the sum.
  int64_t parts = 1;
  void* da = nullptr;        // [parts, P, N, C, C] acc
  void* dqk = nullptr;       // [parts, P, N, C, C] acc
  void* dk_eff = nullptr;    // [parts, P, T, W] acc
  void* dk_carry = nullptr;  // [parts, P, T, W] acc
  void* dq_eff = nullptr;    // [parts, P, T, R] acc
  void* ddecay = nullptr;    // [parts, P, N, U] acc
  void* dbeta = nullptr;     // [parts, P, T] acc
  // Results of the Phase-1 backward.
  void* dk_val = nullptr;  // [P, T, W] acc
  void* dg = nullptr;      // [P, T, gates] acc
  void* dq_val = nullptr;  // [P, T, R] acc
  void* dx = nullptr;      // [P, T, W] acc: gradients of the gates by entry, of the CUDA core; may be dk_carry
};

// One token a stream.
struct Decode {
  Shape shape;  // tokens == 1
  DType dtype = DType::f32;
  Inputs in;
  void* bank = nullptr;  // [P / streams_per_bank, S, D], updated in place
  void* y = nullptr;     // [P, D] bank dtype
};

// Most factors that the CUDA core takes.
inline constexpr int kMostFactors = 32;

// The best k slots of a product of factors, for each of many rows of column scores.
struct ProductKey {
  DType dtype = DType::f32;  // of the scores
  int64_t rows = 0;
  int64_t columns = 0;  // sum of the factors
  int64_t num_factors = 0;
  const int64_t* factors = nullptr;  // [num_factors], in the host's memory
  int64_t k = 0;                     // 1 .. 256
  const void* scores = nullptr;      // [rows, columns]
  void* values = nullptr;            // [rows, k] dtype of the scores
  int32_t* ids = nullptr;            // [rows, k], ascending
};

struct ProductKeyBackward {
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t num_factors = 0;
  const int64_t* factors = nullptr;
  int64_t k = 0;
  const void* d_values = nullptr;  // [rows, k]
  const int32_t* ids = nullptr;    // [rows, k]
  void* d_scores = nullptr;        // [rows, columns]
};

}  // namespace sdm
