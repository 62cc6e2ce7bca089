// Lets a PyTorch for CPUs have tensors on the driver stub's devices: no element of theirs can be read, and no kernel but `empty` runs.
//
// It has what operators of kernels for CUDA need: allocation, also one that fails, the current device and stream of a thread, and
// what autograd asks of a device, which gives each of them a thread. PyTorch asks for the hooks once, when it is imported: this is
// loaded before that.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

extern "C" uintptr_t stub_allocate(int device, size_t size); // of libcuda.c

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
int device_count = 1;
std::atomic<int> failing_allocations{0};
thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

c10::Stream stream_of(c10::DeviceIndex device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), current_streams[device]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return CUDA; }
    c10::Device getDevice() const override { return {CUDA, current}; }
    void setDevice(c10::Device device) const override { current = device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before(CUDA, current);
        current = device.index();
        return before;
    }
    c10::Stream getStream(c10::Device device) const override { return stream_of(device.index()); }
    c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        c10::Stream before = stream_of(stream.device_index());
        current_streams[stream.device_index()] = stream.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
    void record(void **, const c10::Stream &, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    void *getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void *>(stream.id()); }
    bool queryStream(const c10::Stream &) const override { return true; }
    void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return device_count; }
    c10::DeviceIndex getCurrentDevice() const override { return current; }
};

struct Block {
    void *data;
    int device;
    size_t size;
};
std::mutex lock;
std::map<std::pair<int, size_t>, std::vector<void *>> free_blocks; // of a device, by their sizes

void give_back(void *context) {
    auto *block = static_cast<Block *>(context);
    std::lock_guard<std::mutex> held(lock);
    free_blocks[{block->device, block->size}].push_back(block->data);
    delete block;
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        int device = current;
        if (size == 0)
            return {nullptr, c10::Device(CUDA, device)};
        TORCH_CHECK_WITH(OutOfMemoryError, failing_allocations.fetch_sub(failing_allocations > 0) == 0, "no memory, as it was asked for");
        size = (size + 511) / 512 * 512;
        void *data = nullptr;
        {
            std::lock_guard<std::mutex> held(lock);
            auto &blocks = free_blocks[{device, size}];
            if (!blocks.empty()) {
                data = blocks.back();
                blocks.pop_back();
            }
        }
        if (data == nullptr)
            data = reinterpret_cast<void *>(stub_allocate(device, size));
        TORCH_CHECK(data != nullptr, "the driver stub has no memory");
        return {data, new Block{data, device, size}, &give_back, c10::Device(CUDA, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *, const void *, size_t) const override { TORCH_CHECK(false, "no memory of the stub's can be copied"); }
};
Allocator allocator;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

struct OnDevice {
    c10::DeviceIndex before = current;
    explicit OnDevice(std::optional<at::Device> device) {
        if (device.has_value() && device->has_index())
            current = device->index();
    }
    ~OnDevice() { current = before; }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    OnDevice here(device);
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    OnDevice here(device);
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, KEYS,
                                             c10::dtype_or_default(dtype));
}

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("as_strided", [](const at::Tensor &self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(self, size, stride, offset);
    });
    library.impl("view", [](const at::Tensor &self, at::IntArrayRef size) { return at::native::view(self, size); });
}

extern "C" {
void stub_torch_set_devices(int count) { device_count = count; }
void stub_torch_set_stream(int device, intptr_t stream) { current_streams[device] = stream; }
int stub_torch_device() { return current; }
int stub_torch_exchange_device(int device) {
    int before = current;
    if (device >= 0)
        current = device;
    return before;
}
void stub_torch_fail(int count) { failing_allocations = count; }
}
