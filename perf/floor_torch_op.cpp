// What operators cost that are written in C++: TORCH_LIBRARY, for perf/operators.py. One adds two vectors, one adds to a vector.
#include <torch/library.h>
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

static at::Tensor add(const at::Tensor &x, const at::Tensor &y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat && x.sizes() == y.sizes());
    at::Tensor out = at::empty_like(x);
    const float *a = x.const_data_ptr<float>(), *b = y.const_data_ptr<float>();
    float *c = out.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++)
        c[i] = a[i] + b[i];
    return out;
}

static void add_to(const at::Tensor &x, at::Tensor &y) {
    TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat && x.sizes() == y.sizes());
    const float *a = x.const_data_ptr<float>();
    float *c = y.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++)
        c[i] += a[i];
}

TORCH_LIBRARY(fx_floor, library) {
    library.def("add(Tensor x, Tensor y) -> Tensor", {at::Tag::pt2_compliant_tag});
    library.def("add_to(Tensor x, Tensor(a!) y) -> ()", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(fx_floor, CPU, library) {
    library.impl("add", &add);
    library.impl("add_to", &add_to);
}
TORCH_LIBRARY_IMPL(fx_floor, ADInplaceOrView, library) {
    library.impl("add_to", [](c10::DispatchKeySet keys, const at::Tensor &x, at::Tensor &y) {
        static auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fx_floor::add_to", "")
                             .typed<void(const at::Tensor &, at::Tensor &)>();
        torch::autograd::impl::bump_version(y);
        op.redispatch(keys & c10::after_ADInplaceOrView_keyset, x, y);
    });
}
