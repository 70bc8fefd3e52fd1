// Reads the operands, results and attributes of a custom call, checking dtype and shape of each.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/sdm.h"
#include "xla/ffi/api/ffi.h"

namespace sdm {

namespace ffi = xla::ffi;

using Dims = std::vector<int64_t>;

inline std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline Dims join(const Dims& lead, std::initializer_list<int64_t> tail) {
  Dims dims = lead;
  dims.insert(dims.end(), tail);
  return dims;
}

inline int64_t product(const Dims& dims) {
  int64_t result = 1;
  for (int64_t d : dims) result *= d;
  return result;
}

// An operand that does not lie where its result does.
struct Copy {
  const void* from;
  void* to;
  size_t bytes;
};

// Takes operands and results in their order. The first thing that is wrong is kept in `error`;
// after it, everything reads as null and the caller returns the error before any use.
class CallReader {
 public:
  CallReader(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : args_(args), rets_(rets), attrs_(attrs) {}

  // The dimensions and dtype of operand `i`, before it is taken.
  Dims arg_dims(size_t i) const {
    auto buffer = args_.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return {};
    return Dims(buffer->dimensions().begin(), buffer->dimensions().end());
  }
  ffi::DataType arg_dtype(size_t i) const {
    auto buffer = args_.get<ffi::AnyBuffer>(i);
    return buffer.has_value() ? buffer->element_type() : ffi::DataType::INVALID;
  }
  Dims ret_dims(size_t i) const {
    auto buffer = rets_.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return {};
    return Dims((*buffer)->dimensions().begin(), (*buffer)->dimensions().end());
  }

  template <class T = void>
  T* arg(const char* name, ffi::DataType dtype, const Dims& dims) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_arg_++);
    if (!buffer.has_value()) return fail<T>(std::string("operand ") + name + " is missing");
    return check<T>(name, *buffer, dtype, dims);
  }

  template <class T = void>
  T* ret(const char* name, ffi::DataType dtype, const Dims& dims) {
    auto buffer = rets_.get<ffi::AnyBuffer>(next_ret_++);
    if (!buffer.has_value()) return fail<T>(std::string("result ") + name + " is missing");
    return check<T>(name, **buffer, dtype, dims);
  }

  // An operand whose buffer is also a result (input_output_aliases): takes both. A compiler may put them
  // apart all the same; the operand's values are then copied before the work.
  template <class T = void>
  T* in_place(const char* name, ffi::DataType dtype, const Dims& dims) {
    const T* operand = arg<T>(name, dtype, dims);
    T* result = ret<T>(name, dtype, dims);
    const int64_t count = product(dims);
    if (error.success() && operand != result && count > 0) {
      copies.push_back({operand, result, static_cast<size_t>(count) * ffi::ByteWidth(dtype)});
    }
    return result;
  }

  int64_t integer(const char* name) {
    auto value = attrs_.get<int64_t>(name);
    if (!value.has_value()) {
      fail<void>(std::string("integer attribute ") + name + " is missing");
      return 0;
    }
    return *value;
  }

  // Lives as long as the call.
  ffi::Span<const int64_t> integers(const char* name) {
    auto values = attrs_.get<ffi::Span<const int64_t>>(name);
    if (!values.has_value()) {
      fail<void>(std::string("integers attribute ") + name + " is missing");
      return {};
    }
    return *values;
  }

  std::string_view text(const char* name) {
    auto value = attrs_.get<std::string_view>(name);
    if (!value.has_value()) {
      fail<void>(std::string("text attribute ") + name + " is missing");
      return {};
    }
    return *value;
  }

  // Everything was taken.
  void finish() {
    if (next_arg_ != args_.size()) fail<void>("expected " + std::to_string(next_arg_) + " operands");
    if (next_ret_ != rets_.size()) fail<void>("expected " + std::to_string(next_ret_) + " results");
  }

  template <class T>
  T* fail(const std::string& message) {
    if (error.success()) error = ffi::Error::InvalidArgument("sdm_jax: " + message);
    return nullptr;
  }

  ffi::Error error = ffi::Error::Success();
  std::vector<Copy> copies;  // to be made before the work

 private:
  template <class T>
  T* check(const char* name, ffi::AnyBuffer buffer, ffi::DataType dtype, const Dims& dims) {
    const Dims got(buffer.dimensions().begin(), buffer.dimensions().end());
    if (buffer.element_type() != dtype) return fail<T>(std::string(name) + " has the wrong dtype");
    if (got != dims) return fail<T>(std::string(name) + " has shape " + to_string(got) + ", needs " + to_string(dims));
    return static_cast<T*>(buffer.untyped_data());
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
  size_t next_arg_ = 0;
  size_t next_ret_ = 0;
};

}  // namespace sdm
