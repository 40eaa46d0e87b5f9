// A host of plugins in place of TensorRT: numbers, device memory, descriptions of tensors, and comparisons.
#pragma once

#include <NvInferRuntime.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace host
{

using namespace nvinfer1;

[[noreturn]] inline void fail(std::string const& what)
{
    std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    std::exit(1);
}

inline void require(bool is_met, std::string const& what)
{
    if (!is_met)
    {
        fail(what);
    }
}

inline void check(cudaError_t error, char const* what)
{
    require(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}

// -- 16-bit numbers on the host ---------------------------------------------------------------------------------------

inline double decoded(uint16_t bits, DataType type)
{
    if (type == DataType::kHALF)
    {
        __half_raw raw;
        raw.x = bits;
        return static_cast<double>(__half2float(__half(raw)));
    }
    __nv_bfloat16_raw raw;
    raw.x = bits;
    return static_cast<double>(__bfloat162float(__nv_bfloat16(raw)));
}

inline uint16_t encoded(double value, DataType type)
{
    if (type == DataType::kHALF)
    {
        return static_cast<__half_raw>(__float2half(static_cast<float>(value))).x;
    }
    return static_cast<__nv_bfloat16_raw>(__float2bfloat16(static_cast<float>(value))).x;
}

using Bits = std::vector<uint16_t>;

inline std::mt19937 generator{7};

inline Bits random_bits(size_t count, DataType type)
{
    std::normal_distribution<double> normal;
    Bits bits(count);
    for (auto& each : bits)
    {
        each = encoded(normal(generator), type);
    }
    return bits;
}

inline std::vector<double> decoded(Bits const& bits, DataType type)
{
    std::vector<double> values(bits.size());
    for (size_t i = 0; i < bits.size(); ++i)
    {
        values[i] = decoded(bits[i], type);
    }
    return values;
}

// -- device memory ----------------------------------------------------------------------------------------------------

struct Free
{
    void operator()(void* at) const
    {
        cudaFree(at);
    }
};

using Buffer = std::unique_ptr<void, Free>;

inline Buffer poisoned(size_t bytes)
{
    void* at = nullptr;
    check(cudaMalloc(&at, bytes), "cudaMalloc");
    check(cudaMemset(at, 0xff, bytes), "cudaMemset"); // NaN
    return Buffer(at);
}

template <typename T>
Buffer on_device(std::vector<T> const& values)
{
    Buffer buffer = poisoned(values.size() * sizeof(T));
    check(cudaMemcpy(buffer.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    return buffer;
}

inline Bits on_host(void const* at, size_t count)
{
    Bits bits(count);
    check(cudaMemcpy(bits.data(), at, count * 2, cudaMemcpyDeviceToHost), "copy back");
    return bits;
}

// Relative error, after direction and scale were found right.
inline double compared(
    std::vector<double> const& found, std::vector<double> const& expected, double tolerance, char const* what)
{
    double dot = 0, norm = 0, expected_norm = 0, error = 0;
    for (size_t i = 0; i < found.size(); ++i)
    {
        require(std::isfinite(found[i]), std::string(what) + " has what is no number");
        dot += found[i] * expected[i];
        norm += found[i] * found[i];
        expected_norm += expected[i] * expected[i];
        error += (found[i] - expected[i]) * (found[i] - expected[i]);
    }
    double const cosine = dot / std::sqrt(norm * expected_norm);
    double const ratio = std::sqrt(norm / expected_norm);
    double const relative = std::sqrt(error / expected_norm);
    require(cosine > 1 - tolerance * tolerance && std::abs(ratio - 1) < tolerance / 2 && relative < tolerance,
        std::string(what) + ": cosine " + std::to_string(cosine) + ", norm ratio " + std::to_string(ratio) + ", error "
            + std::to_string(relative));
    return relative;
}

// -- TensorRT's part --------------------------------------------------------------------------------------------------

// Sizes as a plugin sees them while a network is built; here all are numbers.
class Size final : public IDimensionExpr
{
public:
    explicit Size(int64_t value)
        : number_(value)
    {
        mImpl = &number_;
    }

private:
    struct Number final : apiv::VDimensionExpr
    {
        explicit Number(int64_t v)
            : value(v)
        {
        }
        bool isConstant() const override
        {
            return true;
        }
        int64_t getConstantValue() const override
        {
            return value;
        }
        bool isSizeTensor() const override
        {
            return false;
        }
        int64_t value;
    };
    Number number_;
};

class Sizes final : public IExprBuilder
{
public:
    Sizes()
    {
        mImpl = &maker_;
    }

private:
    struct Maker final : apiv::VExprBuilder
    {
        IDimensionExpr const* constant(int64_t value) override
        {
            made.push_back(std::make_unique<Size>(value));
            return made.back().get();
        }
        IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override
        {
            return nullptr;
        }
        IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override
        {
            return nullptr;
        }
        std::vector<std::unique_ptr<Size>> made;
    };
    Maker maker_;
};

inline PluginTensorDesc described(std::vector<int64_t> const& dims, DataType type)
{
    PluginTensorDesc desc{};
    desc.dims.nbDims = static_cast<int32_t>(dims.size());
    std::copy(dims.begin(), dims.end(), desc.dims.d);
    desc.type = type;
    desc.format = TensorFormat::kLINEAR;
    return desc;
}

// An input of the plugin.
struct Tensor
{
    PluginTensorDesc desc;
    std::vector<uint8_t> bytes;
};

template <typename T>
Tensor tensor(std::vector<T> const& values, std::vector<int64_t> const& dims, DataType type)
{
    auto const* bytes = reinterpret_cast<uint8_t const*>(values.data());
    return {described(dims, type), {bytes, bytes + values.size() * sizeof(T)}};
}

template <typename Capability>
Capability& capability_of(IPluginV3& plugin, PluginCapabilityType type)
{
    return *static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

// Makes a plugin of what another serializes, and its clone in an execution context, as TensorRT does of a plan.
inline std::unique_ptr<IPluginV3> loaded(IPluginCreatorV3One& creator, IPluginV3& built)
{
    auto& saved = capability_of<IPluginV3OneRuntime>(built, PluginCapabilityType::kRUNTIME);
    std::unique_ptr<IPluginV3> const plugin(
        creator.createPlugin("layer", saved.getFieldsToSerialize(), TensorRTPhase::kRUNTIME));
    require(plugin != nullptr, "what was serialized makes no plugin");
    auto& prototype = capability_of<IPluginV3OneRuntime>(*plugin, PluginCapabilityType::kRUNTIME);
    return std::unique_ptr<IPluginV3>(prototype.attachToContext(nullptr));
}

} // namespace host
