// The whole calls of a GPU, each as several custom calls in a row: XLA captures a run of at least five
// commands into a command buffer. sdm_jax/_cuda_calls.py emits them.
#pragma once

#include "ffi/cuda/backend.h"
#include "ffi/handlers.h"

namespace sdm::cuda {

// Attributes of both: `stages`, a mask of sdm::gpu::Stage or BackwardStage; `first` and `count`, the
// chunks; `fresh`, whether this is the call's first part: the arrays that the parts hand on are then
// results, later operands and results in one.
struct Part {
  int64_t stages, first, count;
  bool fresh;

  explicit Part(Call& call)
      : stages(call.integer("stages")),
        first(call.integer("first")),
        count(call.integer("count")),
        fresh(call.integer("fresh") != 0) {}

  Call::As handed_on() const { return fresh ? Call::As::results : Call::As::in_place; }
  // After the sizes of the call.
  void check(Call& call) const {
    if (first < 0 || count < 0 || first + count > call.shape.chunks()) call.fail<void>("the chunks are out of range");
  }
};

struct StageHandlers {
  using Context = Backend::Context;

  static ffi::Error forward_stage(const Context& context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    const Part part(call);
    Forward f;
    call.set_bank(0);
    call.set_lead(1, 2);
    call.set_sharing();
    const bool save = call.integer("save") != 0;
    call.set_chunks(call.axis(1, 2), call.integer("chunk"), call.integer("held"));
    call.shape.first_chunk = call.integer("first_held");
    call.set_entries(call.last(1), call.last(6), call.last(5));
    part.check(call);
    const Shape& s = call.shape;
    f.quant = call.quant(call.text("snapshot_quant"));
    f.bank = call.in_place("bank", call.type, call.bank_dims());
    f.in = call.take_inputs(Call::Takes::all);
    const Call::As as = part.handed_on();
    const Dims one_chunk = join(call.lead, {s.chunk, s.width});
    const Dims rows = save ? call.tokens(s.width) : one_chunk;
    f.one_chunk_rows = !save;
    f.y = call.take(as, "y", call.type, call.tokens(s.width));
    f.chunks = call.take_chunks(as);
    f.x = call.take(as, "x", call.acc, call.squares());
    if (save) f.error = call.take(as, "error", call.acc, rows);
    f.delta = call.take(as, "delta", call.acc, rows);
    if (save) {
      if (s.stored_chunks != s.chunks()) call.fail<void>("a saving call stores all chunks");
      f.snapshot = call.take(as, "snapshot", call.snapshot_type(f.quant),
                             join(call.lead, {s.stored_chunks, s.write_slots, call.snapshot_columns(f.quant)}));
      f.scale = call.only_with_scales(
          f.quant, call.take<float>(as, "scale", ffi::DataType::F32, call.chunks(call.scales(f.quant))));
    }
    f.qx = call.take(as, "qx", call.acc, call.squares());                             // workspace
    f.inter = call.take(as, "inter", call.acc, one_chunk);                            // workspace
    f.u = call.take(as, "u", call.acc, one_chunk);                                    // workspace
    f.records = call.take(as, "records", kIds, call.chunks(4 * s.chunk * s.writes));  // workspace
    f.shape = s;
    f.dtype = call.dtype();
    SDM_RUN(call, Backend::forward(context, f, part.stages, part.first, part.count));
  }

  static ffi::Error backward_stage(const Context& context, Args args, Rets rets, Attrs attrs) {
    Call call(args, rets, attrs);
    const Part part(call);
    Backward b;
    call.set_bank(0);
    call.set_lead(3, 2);
    call.set_sharing();
    call.set_chunks(call.axis(3, 2), call.integer("chunk"), INT64_MAX);
    call.set_entries(call.last(3), call.last(7), call.last(6));
    part.check(call);
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
    const Call::As as = part.handed_on();
    const auto parts = [&](const Dims& dims) {
      Dims all = {b.parts};
      all.insert(all.end(), dims.begin(), dims.end());
      return all;
    };
    b.dk_val = call.take(as, "dk_val", call.acc, call.tokens(s.writes));
    b.dv = call.take(as, "dv", call.acc, call.tokens(s.width));
    b.dbeta = call.take(as, "dbeta", call.acc, call.tokens(1));
    b.dg = call.take(as, "dg", call.acc, call.tokens(s.gates));
    b.dq_val = call.take(as, "dq_val", call.acc, call.tokens(s.reads));
    // Workspaces.
    b.da = call.take(as, "da", call.acc, call.squares());
    b.dqk = call.take(as, "dqk", call.acc, call.squares());
    b.qx = call.take(as, "qx", call.acc, call.squares());
    b.write_records = call.take(as, "write_records", kIds, call.chunks(4 * s.chunk * s.writes));
    b.read_records = call.take(as, "read_records", kIds, call.chunks(4 * s.chunk * s.reads));
    b.dk_eff = call.take(as, "dk_eff", call.acc, parts(call.tokens(s.writes)));
    b.dk_carry = call.take(as, "dk_carry", call.acc, parts(call.tokens(s.writes)));
    b.dq_eff = call.take(as, "dq_eff", call.acc, parts(call.tokens(s.reads)));
    b.ddecay = call.take(as, "ddecay", call.acc, parts(call.chunks(s.write_slots)));
    b.carried = call.take(as, "carried", call.acc, join(call.lead, {s.chunk, s.width}));
    b.dx = b.dk_carry;  // an entry's dk_carry is read before its dx is written
    b.shape = s;
    b.dtype = call.dtype();
    b.grad_dtype = Call::to_dtype(grad);
    SDM_RUN(call, Backend::backward(context, b, part.stages, part.first, part.count));
  }
};

}  // namespace sdm::cuda
