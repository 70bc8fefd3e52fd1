// The Python module of the GPU: its custom calls by name.
#include <nanobind/nanobind.h>

#include <atomic>

#include "ffi/cuda/stages.h"

namespace nb = nanobind;

namespace {

namespace ffi = xla::ffi;
using Context = sdm::cuda::Backend::Context;

std::atomic<int64_t> calls{0};

template <auto handler>
ffi::Error on_stream(cudaStream_t stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attrs) {
  calls.fetch_add(1, std::memory_order_relaxed);
  return handler(Context{stream, device}, args, rets, attrs);
}

template <auto handler>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  static const auto* bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                 .Ctx<ffi::DeviceOrdinal>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To(on_stream<handler>, {ffi::Traits::kCmdBufferCompatible})
                                 .release();
  return bound->Call(frame);
}

template <auto handler>
nb::capsule capsule() {
  return nb::capsule(reinterpret_cast<void*>(&call<handler>), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

NB_MODULE(_cuda, m) {
  // How often any handler has run: a replayed command buffer runs none.
  m.def("calls", [] { return calls.load(); });
  // Capsules of all handlers, for jax.ffi.register_ffi_target.
  m.def("targets", [] {
    nb::dict targets;
#define SDM_ADD(name) targets["sdm_" #name] = capsule<&sdm::Handlers<sdm::cuda::Backend>::name>();
    SDM_FOR_STEP_CALLS(SDM_ADD)
#undef SDM_ADD
    targets["sdm_forward_stage"] = capsule<&sdm::cuda::StageHandlers::forward_stage>();
    targets["sdm_backward_stage"] = capsule<&sdm::cuda::StageHandlers::backward_stage>();
    return targets;
  });
}
