// Every custom call once, as a template over the backend that runs it: the operands and results in
// order, their shapes, and the launcher. sdm_jax/_calls.py makes the calls in the same order.
//
// `Backend` has a `Context` (the thread pool, or a CUDA stream), kOnDevice (some calls then need a
// workspace more) and one launcher for each call, which returns an ffi::Error.
#pragma once

#include <algorithm>
#include <string_view>

#include "ffi/buffers.h"

namespace sdm {

inline constexpr ffi::DataType kIds = ffi::DataType::S32;

// A CallReader that knows the sizes of the call.
class Call : public CallReader {
 public:
  using CallReader::CallReader;

  Shape shape;
  Dims bank_lead;
  Dims lead;                                // leading axes of the tokens
  ffi::DataType type = ffi::DataType::F32;  // of the bank
  ffi::DataType acc = ffi::DataType::F32;
  bool one_token = false;  // tokens come without their axis

  void set_type(ffi::DataType bank) {
    type = bank;
    acc = bank == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
    if (bank != ffi::DataType::F32 && bank != ffi::DataType::BF16 && bank != ffi::DataType::F64) {
      fail<void>("the bank must be float32, bfloat16 or float64");
    }
  }
  DType dtype() const { return to_dtype(type); }
  static DType to_dtype(ffi::DataType t) {
    return t == ffi::DataType::F64 ? DType::f64 : t == ffi::DataType::BF16 ? DType::bf16 : DType::f32;
  }

  // The bank [*A, S, D] is operand `i`.
  void set_bank(size_t i) {
    set_type(arg_dtype(i));
    bank_lead = arg_dims(i);
    if (bank_lead.size() < 2) {
      fail<void>("the bank needs at least two axes");
      return;
    }
    shape.width = bank_lead.back();
    bank_lead.pop_back();
    shape.slots = bank_lead.back();
    bank_lead.pop_back();
    if (shape.slots >= int64_t{1} << 31) fail<void>("a bank needs fewer than 2^31 slots");
  }

  // The axes before the last `tail` of operand `i` are the tokens' leading axes.
  void set_lead(size_t i, size_t tail) {
    lead = arg_dims(i);
    if (lead.size() < tail) {
      fail<void>("an operand has too few axes");
      lead.clear();
      return;
    }
    lead.resize(lead.size() - tail);
    shape.streams = product(lead);
  }
  // After set_bank and set_lead.
  void set_sharing() {
    if (bank_lead.size() > lead.size() || !std::equal(bank_lead.begin(), bank_lead.end(), lead.begin())) {
      fail<void>("the bank's leading axes must be the first of the tokens'");
      return;
    }
    const int64_t banks = product(bank_lead);
    shape.streams_per_bank = banks > 0 ? shape.streams / banks : 1;
  }

  // Sizes of chunks; `stored` of them lie in the arrays of chunks.
  void set_chunks(int64_t tokens, int64_t chunk, int64_t stored) {
    if (chunk < 1) {
      fail<void>("the chunk must be at least 1");
      return;
    }
    shape.tokens = tokens;
    shape.chunk = chunk;
    shape.stored_chunks = std::min(stored, shape.chunks());
    shape.stored_tokens = std::min(tokens, shape.stored_chunks * chunk);
  }
  void set_entries(int64_t writes, int64_t reads, int64_t gates) {
    shape.writes = writes;
    shape.reads = reads;
    shape.gates = gates;
    shape.write_slots = std::min(shape.chunk * writes, shape.slots);
    shape.read_slots = std::min(shape.chunk * reads, shape.slots);
    if (gates != 1 && gates != writes) fail<void>("g needs one gate a token or one a write");
  }
  // The last axis of operand `i`.
  int64_t last(size_t i) const {
    const Dims dims = arg_dims(i);
    return dims.empty() ? 0 : dims.back();
  }
  // Axis `from_end` counted from the last (1).
  int64_t axis(size_t i, size_t from_end) const {
    const Dims dims = arg_dims(i);
    return dims.size() < from_end ? 0 : dims[dims.size() - from_end];
  }

  Dims bank_dims() const { return join(bank_lead, {shape.slots, shape.width}); }
  Dims tokens(int64_t columns) const { return join(lead, {shape.tokens, columns}); }
  Dims stored_tokens(int64_t columns) const { return join(lead, {shape.stored_tokens, columns}); }
  Dims squares() const { return join(lead, {shape.stored_chunks, shape.chunk, shape.chunk}); }
  Dims chunks(int64_t columns) const { return join(lead, {shape.stored_chunks, columns}); }

  Quant quant(std::string_view mode) {
    if (mode == "none") return Quant::none;
    if (mode == "bf16") return Quant::bf16;
    if (mode == "fp8") return Quant::fp8;
    if (mode == "int4") return Quant::int4;
    fail<void>("unknown snapshot_quant");
    return Quant::none;
  }
  ffi::DataType snapshot_type(Quant mode) const {
    switch (mode) {
      case Quant::none:
        return type;
      case Quant::bf16:
        return ffi::DataType::BF16;
      case Quant::fp8:
        return ffi::DataType::F8E4M3FN;
      case Quant::int4:
        return ffi::DataType::U8;
    }
    return type;
  }
  int64_t snapshot_columns(Quant mode) const { return mode == Quant::int4 ? (shape.width + 1) / 2 : shape.width; }
  // The scales of a snapshot, null in the modes without: their array has no elements to look at.
  template <class T>
  T* only_with_scales(Quant mode, T* scale) const {
    return mode == Quant::fp8 || mode == Quant::int4 ? scale : nullptr;
  }
  int64_t scales(Quant mode) const { return mode == Quant::fp8 || mode == Quant::int4 ? shape.write_slots : 0; }

  // How an array comes: as an operand, a result, or both.
  enum class As { operands, results, in_place };
  template <class T = void>
  T* take(As as, const char* name, ffi::DataType dtype, const Dims& dims) {
    if (as == As::in_place) return in_place<T>(name, dtype, dims);
    return as == As::results ? ret<T>(name, dtype, dims) : arg<T>(name, dtype, dims);
  }

  // Sizes of a selection by product keys, from operand 0; returns the dimensions of what is selected.
  template <class Params>
  Dims set_product_key(Params& p) {
    set_type(arg_dtype(0));
    set_lead(0, 1);
    p.dtype = dtype();
    p.rows = product(lead);
    p.k = integer("k");
    const auto factors = integers("factors");
    p.num_factors = static_cast<int64_t>(factors.size());
    p.factors = factors.begin();
    for (int64_t n : factors) {
      if (n < 1) fail<void>("a factor must be at least 1");
      p.columns += n;
    }
    if (p.k < 1 || p.k > 256) fail<void>("k must be in 1..256");
    if (factors.size() == 0) fail<void>("there are no factors");
    return join(lead, {p.k});
  }

  // What tokens ask of their bank; `tokens` or, in decode, one token a stream.
  enum class Takes { all, without_v, without_v_and_beta };
  Inputs take_inputs(Takes takes) {
    const Shape& s = shape;
    const auto row = [&](int64_t columns) { return one_token ? join(lead, {columns}) : tokens(columns); };
    Inputs in;
    in.k_idx = arg<int32_t>("k_idx", kIds, row(s.writes));
    in.k_val = arg("k_val", type, row(s.writes));
    if (takes == Takes::all) in.v = arg("v", type, row(s.width));
    if (takes != Takes::without_v_and_beta) in.beta = arg("beta", acc, row(1));
    in.g = arg("g", acc, row(s.gates));
    in.q_idx = arg<int32_t>("q_idx", kIds, row(s.reads));
    in.q_val = arg("q_val", type, row(s.reads));
    return in;
  }

  // Phase 1's results.
  Chunks take_chunks(As as) {
    const Shape& s = shape;
    const auto ids = [&](const char* name, const Dims& dims) {
      return take<int32_t>(as, name, ffi::DataType::S32, dims);
    };
    Chunks c;
    c.a = take(as, "a", acc, squares());
    c.qk = take(as, "qk", acc, squares());
    c.k_eff = take(as, "k_eff", acc, stored_tokens(s.writes));
    c.k_carry = take(as, "k_carry", acc, stored_tokens(s.writes));
    c.q_eff = take(as, "q_eff", acc, stored_tokens(s.reads));
    c.slots = ids("slots", chunks(s.write_slots));
    c.starts = ids("starts", chunks(s.write_slots + 1));
    c.order = ids("order", chunks(s.chunk * s.writes));
    c.decay = take(as, "decay", acc, chunks(s.write_slots));
    c.read_slots = ids("read_slots", chunks(s.read_slots));
    c.read_starts = ids("read_starts", chunks(s.read_slots + 1));
    c.read_order = ids("read_order", chunks(s.chunk * s.reads));
    c.writes = ids("writes", join(lead, {s.stored_tokens}));
    return c;
  }
};

using Args = ffi::RemainingArgs;
using Rets = ffi::RemainingRets;
using Attrs = ffi::Dictionary;

// Returns the reader's error, if any; else makes its copies and runs the backend.
#define SDM_RUN(call, launch)                        \
  do {                                               \
    (call).finish();                                 \
    for (const Copy& copy : (call).copies) {         \
      if ((call).error.failure()) break;             \
      (call).error = Backend::copy(context, copy);   \
    }                                                \
    if ((call).error.failure()) return (call).error; \
    return launch;                                   \
  } while (0)

template <class Backend>
struct Handlers {
  using Context = typename Backend::Context;

  static ffi::Error phase1(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_type(call.arg_dtype(1));
    call.shape.slots = call.integer("num_slots");
    call.set_lead(0, 2);
    call.set_chunks(call.axis(0, 2), call.integer("chunk"), INT64_MAX);
    call.set_entries(call.last(0), call.last(3), call.last(2));
    const Shape& s = call.shape;
    f.in = call.take_inputs(Call::Takes::without_v_and_beta);
    f.chunks = call.take_chunks(Call::As::results);
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::phase1(context, f));
  }

  static ffi::Error solve(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_type(call.arg_dtype(0));
    call.set_lead(0, 3);
    call.set_chunks(call.axis(2, 2), call.last(0), INT64_MAX);
    f.chunks.a = call.arg("a", call.acc, call.squares());
    f.chunks.qk = call.arg("qk", call.acc, call.squares());
    f.in.beta = call.arg("beta", call.acc, call.tokens(1));
    f.chunks.writes = call.arg<int32_t>("writes", kIds, join(call.lead, {call.shape.tokens}));
    f.x = call.ret("x", call.acc, call.squares());
    f.qx = call.ret("qx", call.acc, call.squares());
    f.shape = call.shape;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::solve(context, f));
  }

  static ffi::Error gather(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_bank(0);
    call.set_lead(1, 2);
    call.set_sharing();
    call.set_chunks(call.axis(1, 2), call.axis(1, 2), 1);
    call.set_entries(call.last(1), call.last(3), 1);
    const Shape& s = call.shape;
    f.bank = call.arg("bank", call.type, call.bank_dims());
    f.in.k_idx = call.arg<int32_t>("k_idx", kIds, call.tokens(s.writes));
    f.chunks.k_eff = call.arg("k_eff", call.acc, call.tokens(s.writes));
    f.in.q_idx = call.arg<int32_t>("q_idx", kIds, call.tokens(s.reads));
    f.chunks.q_eff = call.arg("q_eff", call.acc, call.tokens(s.reads));
    f.retrieved = call.ret("retrieved", call.acc, call.tokens(s.width));
    f.inter = call.ret("inter", call.acc, call.tokens(s.width));
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::gather(context, f));
  }

  static ffi::Error take_snapshot(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_bank(0);
    call.set_lead(1, 1);
    call.set_sharing();
    call.set_chunks(1, 1, 1);
    call.shape.write_slots = call.last(1);
    const Shape& s = call.shape;
    f.quant = call.quant(call.text("snapshot_quant"));
    f.bank = call.arg("bank", call.type, call.bank_dims());
    f.chunks.slots = call.arg<int32_t>("slots", kIds, join(call.lead, {s.write_slots}));
    f.snapshot = call.ret("snapshot", call.snapshot_type(f.quant),
                          join(call.lead, {s.write_slots, call.snapshot_columns(f.quant)}));
    f.scale = call.only_with_scales(
        f.quant, call.ret<float>("scale", ffi::DataType::F32, join(call.lead, {call.scales(f.quant)})));
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::take_snapshot(context, f));
  }

  static ffi::Error dual_matmul(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_type(call.arg_dtype(4));
    call.set_lead(0, 2);
    call.set_chunks(call.last(0), call.last(0), 1);
    call.shape.width = call.last(4);
    const Shape& s = call.shape;
    const Dims square = join(call.lead, {s.chunk, s.chunk});
    f.x = call.arg("x", call.acc, square);
    f.qx = call.arg("qx", call.acc, square);
    f.in.beta = call.arg("beta", call.acc, call.tokens(1));
    f.chunks.writes = call.arg<int32_t>("writes", kIds, join(call.lead, {s.tokens}));
    f.in.v = call.arg("v", call.type, call.tokens(s.width));
    f.retrieved = call.arg("retrieved", call.acc, call.tokens(s.width));
    f.inter = call.arg("inter", call.acc, call.tokens(s.width));
    f.error = call.ret("error", call.acc, call.tokens(s.width));
    f.delta = call.ret("delta", call.acc, call.tokens(s.width));
    f.y = call.ret("y", call.type, call.tokens(s.width));
    f.u = call.ret("u", call.acc, call.tokens(s.width));  // workspace
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::dual_matmul(context, f));
  }

  static ffi::Error mover(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_bank(0);
    call.set_lead(4, 2);
    call.set_sharing();
    call.set_chunks(call.axis(4, 2), call.axis(4, 2), 1);
    call.set_entries(call.last(4), 1, 1);
    const Shape& s = call.shape;
    f.bank = call.in_place("bank", call.type, call.bank_dims());
    f.chunks.slots = call.arg<int32_t>("slots", kIds, join(call.lead, {s.write_slots}));
    f.chunks.starts = call.arg<int32_t>("starts", kIds, join(call.lead, {s.write_slots + 1}));
    f.chunks.order = call.arg<int32_t>("order", kIds, join(call.lead, {s.chunk * s.writes}));
    f.chunks.k_carry = call.arg("k_carry", call.acc, call.tokens(s.writes));
    f.chunks.decay = call.arg("decay", call.acc, join(call.lead, {s.write_slots}));
    f.delta = call.arg("delta", call.acc, call.tokens(s.width));
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::mover(context, f));
  }

  static ffi::Error gather_gradient(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_bank(0);
    call.set_lead(1, 2);
    call.set_sharing();
    call.set_chunks(call.axis(1, 2), call.axis(1, 2), 1);
    call.set_entries(call.last(1), 1, 1);
    const Shape& s = call.shape;
    b.d_bank = call.arg("d_bank", call.type, call.bank_dims());
    b.in.k_idx = call.arg<int32_t>("k_idx", kIds, call.tokens(s.writes));
    b.chunks.k_carry = call.arg("k_carry", call.acc, call.tokens(s.writes));
    b.carried = call.ret("carried", call.acc, call.tokens(s.width));
    b.shape = s;
    b.dtype = b.grad_dtype = call.dtype();
    SDM_RUN(call, Backend::gather_gradient(context, b));
  }

  static ffi::Error du_matmul(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_type(call.arg_dtype(5));
    call.set_lead(0, 2);
    call.set_chunks(call.last(0), call.last(0), 1);
    call.shape.width = call.last(5);
    const Shape& s = call.shape;
    const Dims square = join(call.lead, {s.chunk, s.chunk});
    b.chunks.a = call.arg("a", call.acc, square);
    b.chunks.qk = call.arg("qk", call.acc, square);
    b.x = call.arg("x", call.acc, square);
    b.in.beta = call.arg("beta", call.acc, call.tokens(1));
    b.chunks.writes = call.arg<int32_t>("writes", kIds, join(call.lead, {s.tokens}));
    b.dy = call.arg("dy", call.type, call.tokens(s.width));
    b.carried = call.in_place("carried", call.acc, call.tokens(s.width));  // workspace
    b.error = call.arg("error", call.acc, call.tokens(s.width));
    b.delta = call.arg("delta", call.acc, call.tokens(s.width));
    b.dv = call.ret("dv", call.acc, call.tokens(s.width));
    b.dbeta = call.ret("dbeta", call.acc, call.tokens(1));
    b.da = call.ret("da", call.acc, square);
    b.dqk = call.ret("dqk", call.acc, square);
    if constexpr (Backend::kOnDevice) b.qx = call.ret("qx", call.acc, square);  // workspace
    b.shape = s;
    b.dtype = b.grad_dtype = call.dtype();
    SDM_RUN(call, Backend::du_matmul(context, b));
  }

  static ffi::Error write_mover(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_bank(0);
    call.set_lead(6, 2);
    call.set_sharing();
    call.set_chunks(call.axis(6, 2), call.axis(6, 2), 1);
    call.set_entries(call.last(6), 1, 1);
    const Shape& s = call.shape;
    const ffi::DataType grad = call.arg_dtype(1);
    if (grad != call.type && grad != ffi::DataType::F32) call.fail<void>("d_bank has the wrong dtype");
    b.quant = call.quant(call.text("snapshot_quant"));
    b.bank = call.in_place("bank", call.type, call.bank_dims());
    b.d_bank = call.in_place("d_bank", grad, call.bank_dims());
    b.chunks.slots = call.arg<int32_t>("slots", kIds, join(call.lead, {s.write_slots}));
    b.chunks.starts = call.arg<int32_t>("starts", kIds, join(call.lead, {s.write_slots + 1}));
    b.chunks.order = call.arg<int32_t>("order", kIds, join(call.lead, {s.chunk * s.writes}));
    b.chunks.decay = call.arg("decay", call.acc, join(call.lead, {s.write_slots}));
    b.chunks.k_eff = call.arg("k_eff", call.acc, call.tokens(s.writes));
    b.snapshot = call.arg("snapshot", call.snapshot_type(b.quant),
                          join(call.lead, {s.write_slots, call.snapshot_columns(b.quant)}));
    b.scale = call.only_with_scales(
        b.quant, call.arg<float>("scale", ffi::DataType::F32, join(call.lead, {call.scales(b.quant)})));
    b.delta = call.arg("delta", call.acc, call.tokens(s.width));
    b.dv = call.arg("dv", call.acc, call.tokens(s.width));
    b.dk_eff = call.ret("dk_eff", call.acc, call.tokens(s.writes));
    b.dk_carry = call.ret("dk_carry", call.acc, call.tokens(s.writes));
    b.ddecay = call.ret("ddecay", call.acc, join(call.lead, {s.write_slots}));
    b.shape = s;
    b.dtype = call.dtype();
    b.grad_dtype = Call::to_dtype(grad);
    SDM_RUN(call, Backend::write_mover(context, b));
  }

  static ffi::Error read_mover(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_bank(0);
    call.set_lead(5, 2);
    call.set_sharing();
    call.set_chunks(call.axis(5, 2), call.axis(5, 2), 1);
    call.set_entries(1, call.last(5), 1);
    const Shape& s = call.shape;
    const ffi::DataType grad = call.arg_dtype(1);
    if (grad != call.type && grad != ffi::DataType::F32) call.fail<void>("d_bank has the wrong dtype");
    b.bank = call.arg("bank", call.type, call.bank_dims());
    b.d_bank = call.in_place("d_bank", grad, call.bank_dims());
    b.chunks.read_slots = call.arg<int32_t>("read_slots", kIds, join(call.lead, {s.read_slots}));
    b.chunks.read_starts = call.arg<int32_t>("read_starts", kIds, join(call.lead, {s.read_slots + 1}));
    b.chunks.read_order = call.arg<int32_t>("read_order", kIds, join(call.lead, {s.chunk * s.reads}));
    b.chunks.q_eff = call.arg("q_eff", call.acc, call.tokens(s.reads));
    b.dy = call.arg("dy", call.type, call.tokens(s.width));
    b.dq_eff = call.ret("dq_eff", call.acc, call.tokens(s.reads));
    b.shape = s;
    b.dtype = call.dtype();
    b.grad_dtype = Call::to_dtype(grad);
    SDM_RUN(call, Backend::read_mover(context, b));
  }

  static ffi::Error phase1_backward(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_type(call.arg_dtype(1));
    call.shape.slots = call.integer("num_slots");
    call.set_lead(0, 2);
    call.set_chunks(call.axis(0, 2), call.integer("chunk"), INT64_MAX);
    call.set_entries(call.last(0), call.last(3), call.last(2));
    const Shape& s = call.shape;
    b.in = call.take_inputs(Call::Takes::without_v_and_beta);
    b.chunks = call.take_chunks(Call::As::operands);
    b.da = call.arg("da", call.acc, call.squares());
    b.dqk = call.arg("dqk", call.acc, call.squares());
    b.dk_eff = call.arg("dk_eff", call.acc, call.tokens(s.writes));
    b.dk_carry = call.arg("dk_carry", call.acc, call.tokens(s.writes));
    b.dq_eff = call.arg("dq_eff", call.acc, call.tokens(s.reads));
    b.ddecay = call.arg("ddecay", call.acc, call.chunks(s.write_slots));
    b.dk_val = call.ret("dk_val", call.acc, call.tokens(s.writes));
    b.dg = call.ret("dg", call.acc, call.tokens(s.gates));
    b.dq_val = call.ret("dq_val", call.acc, call.tokens(s.reads));
    if constexpr (Backend::kOnDevice) b.dx = call.ret("dx", call.acc, call.tokens(s.writes));  // workspace
    b.shape = s;
    b.dtype = b.grad_dtype = call.dtype();
    SDM_RUN(call, Backend::phase1_backward(context, b));
  }

  static ffi::Error forward(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Forward f;
    call.set_bank(0);
    call.set_lead(1, 2);
    call.set_sharing();
    // Results of Phase 1 for all chunks, or for a slab: result 2 is `a`, [*B, stored chunks, C, C].
    const Dims a_dims = call.ret_dims(2);
    const int64_t stored = a_dims.size() < 3 ? 0 : a_dims[a_dims.size() - 3];
    call.set_chunks(call.axis(1, 2), call.integer("chunk"), stored);
    call.set_entries(call.last(1), call.last(6), call.last(5));
    const Shape& s = call.shape;
    const bool save = call.integer("save") != 0;
    const int64_t parts = call.integer("parts");
    f.quant = call.quant(call.text("snapshot_quant"));
    f.bank = call.in_place("bank", call.type, call.bank_dims());
    f.in = call.take_inputs(Call::Takes::all);
    f.y = call.ret("y", call.type, call.tokens(s.width));
    f.chunks = call.take_chunks(Call::As::results);
    f.x = call.ret("x", call.acc, call.squares());
    f.error = call.ret("error", call.acc, call.stored_tokens(s.width));
    f.delta = call.ret("delta", call.acc, call.stored_tokens(s.width));
    if (save) {
      if (s.stored_chunks != s.chunks()) call.fail<void>("a saving call stores all chunks");
      f.snapshot = call.ret("snapshot", call.snapshot_type(f.quant),
                            join(call.lead, {s.stored_chunks, s.write_slots, call.snapshot_columns(f.quant)}));
      f.scale = call.only_with_scales(f.quant,
                                      call.ret<float>("scale", ffi::DataType::F32, call.chunks(call.scales(f.quant))));
    }
    f.qx = call.ret("qx", call.acc, call.squares());                                           // workspace
    f.retrieved = f.u = call.ret("retrieved", call.acc, join(call.lead, {s.chunk, s.width}));  // workspace
    f.inter = call.ret("inter", call.acc, join(call.lead, {s.chunk, s.width}));                // workspace
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::forward(context, f, parts));
  }

  static ffi::Error backward(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Backward b;
    call.set_bank(0);
    call.set_lead(3, 2);
    call.set_sharing();
    call.set_chunks(call.axis(3, 2), call.integer("chunk"), INT64_MAX);
    call.set_entries(call.last(3), call.last(7), call.last(6));
    const Shape& s = call.shape;
    const ffi::DataType grad = call.arg_dtype(1);
    if (grad != call.type && grad != ffi::DataType::F32) call.fail<void>("d_bank has the wrong dtype");
    b.quant = call.quant(call.text("snapshot_quant"));
    b.parts = call.integer("parts");
    b.bank = call.in_place("bank", call.type, call.bank_dims());
    b.d_bank = call.in_place("d_bank", grad, call.bank_dims());
    b.dy = call.arg("dy", call.type, call.tokens(s.width));
    b.in = call.take_inputs(Call::Takes::without_v);
    b.chunks = call.take_chunks(Call::As::operands);
    b.x = call.arg("x", call.acc, call.squares());
    b.error = call.arg("error", call.acc, call.tokens(s.width));
    b.delta = call.arg("delta", call.acc, call.tokens(s.width));
    b.snapshot = call.arg("snapshot", call.snapshot_type(b.quant),
                          join(call.lead, {s.stored_chunks, s.write_slots, call.snapshot_columns(b.quant)}));
    b.scale =
        call.only_with_scales(b.quant, call.arg<float>("scale", ffi::DataType::F32, call.chunks(call.scales(b.quant))));
    b.dk_val = call.ret("dk_val", call.acc, call.tokens(s.writes));
    b.dv = call.ret("dv", call.acc, call.tokens(s.width));
    b.dg = call.ret("dg", call.acc, call.tokens(s.gates));
    b.dq_val = call.ret("dq_val", call.acc, call.tokens(s.reads));
    // Sums over columns, one copy for each column range; the rest are workspaces too, but for dbeta.
    const auto parts = [&](const Dims& dims) {
      Dims all = {b.parts};
      all.insert(all.end(), dims.begin(), dims.end());
      return all;
    };
    b.dbeta = call.ret("dbeta", call.acc, parts(call.tokens(1)));
    b.da = call.ret("da", call.acc, parts(call.squares()));
    b.dqk = call.ret("dqk", call.acc, parts(call.squares()));
    b.dk_eff = call.ret("dk_eff", call.acc, parts(call.tokens(s.writes)));
    b.dk_carry = call.ret("dk_carry", call.acc, parts(call.tokens(s.writes)));
    b.dq_eff = call.ret("dq_eff", call.acc, parts(call.tokens(s.reads)));
    b.ddecay = call.ret("ddecay", call.acc, parts(call.chunks(s.write_slots)));
    b.carried = call.ret("carried", call.acc, join(call.lead, {s.chunk, s.width}));
    b.shape = s;
    b.dtype = call.dtype();
    b.grad_dtype = Call::to_dtype(grad);
    SDM_RUN(call, Backend::backward(context, b));
  }

  static ffi::Error decode(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    Decode d;
    call.set_bank(0);
    call.set_lead(1, 1);
    call.set_sharing();
    call.set_chunks(1, 1, 1);
    call.set_entries(call.last(1), call.last(6), call.last(5));
    call.one_token = true;
    const Shape& s = call.shape;
    d.bank = call.in_place("bank", call.type, call.bank_dims());
    d.in = call.take_inputs(Call::Takes::all);
    d.y = call.ret("y", call.type, join(call.lead, {s.width}));
    d.shape = s;
    d.dtype = call.dtype();
    SDM_RUN(call, Backend::decode(context, d));
  }

  static ffi::Error product_key_topk(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    ProductKey p;
    const Dims row = call.set_product_key(p);
    p.scores = call.arg("scores", call.type, join(call.lead, {p.columns}));
    p.values = call.ret("values", call.type, row);
    p.ids = call.ret<int32_t>("ids", kIds, row);
    SDM_RUN(call, Backend::product_key_topk(context, p));
  }

  static ffi::Error product_key_topk_backward(Context context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    ProductKeyBackward p;
    const Dims row = call.set_product_key(p);
    p.d_values = call.arg("d_values", call.type, row);
    p.ids = call.arg<int32_t>("ids", kIds, row);
    p.d_scores = call.ret("d_scores", call.type, join(call.lead, {p.columns}));
    SDM_RUN(call, Backend::product_key_topk_backward(context, p));
  }
};

// The handlers of the steps, of decode and of product keys, for registration: the target of `name` is "sdm_" #name. The
// whole calls are sdm_forward and sdm_backward, and on a GPU the stages of ffi/cuda/stages.h.
#define SDM_FOR_STEP_CALLS(visit)                                                                                      \
  visit(phase1) visit(solve) visit(gather) visit(take_snapshot) visit(dual_matmul) visit(mover) visit(gather_gradient) \
      visit(du_matmul) visit(write_mover) visit(read_mover) visit(phase1_backward) visit(decode)                       \
          visit(product_key_topk) visit(product_key_topk_backward)

#define SDM_FOR_ALL_CALLS(visit) \
  SDM_FOR_STEP_CALLS(visit)      \
  visit(forward) visit(backward)

}  // namespace sdm
