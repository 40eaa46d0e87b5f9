// Launches that may begin while the kernel before them ends (programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

namespace dflash
{

// The next kernel may be put in place beside this one, and read what no kernel of the step writes: weights.
__device__ __forceinline__ void trigger()
{
    asm volatile("griddepcontrol.launch_dependents;");
}

// What the kernels before this one wrote can be seen after it. Every thread calls it, for a grid that ended without
// waiting would let the one after it run too soon.
__device__ __forceinline__ void wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// First in every kernel that has nothing to do before it waits.
__device__ __forceinline__ void begin()
{
    trigger();
    wait();
}

template <typename... Params, typename... Arguments>
cudaError_t launch_kernel(
    void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, Arguments... arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(arguments)...);
}

} // namespace dflash
