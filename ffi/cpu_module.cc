// The Python module of the CPU: its custom calls by name.
#include <nanobind/nanobind.h>

#include "ffi/cpu/backend.h"
#include "ffi/handlers.h"

namespace nb = nanobind;

namespace {

namespace ffi = xla::ffi;

using Handler = ffi::Error (*)(ffi::ThreadPool, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary);

template <Handler handler>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  static const auto* bound =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs().To(handler).release();
  return bound->Call(frame);
}

}  // namespace

NB_MODULE(_cpu, m) {
  // Capsules of all handlers, for jax.ffi.register_ffi_target.
  m.def("targets", [] {
    nb::dict targets;
#define SDM_ADD(name)     \
  targets["sdm_" #name] = \
      nb::capsule(reinterpret_cast<void*>(&call<sdm::Handlers<sdm::cpu::Backend>::name>), "xla._CUSTOM_CALL_TARGET");
    SDM_FOR_ALL_CALLS(SDM_ADD)
#undef SDM_ADD
    return targets;
  });
  m.def("isa", [] { return sdm::cpu::isa_name(); });
}
