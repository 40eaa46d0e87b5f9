// Launches that may begin while the kernel before them ends (programmatic dependent launch).
#pragma once

#include <atomic>
#include <cstdint>
#include <cuda_runtime.h>

namespace dflash
{

// The next kernel may be put in place beside this one, and read what no kernel of the step writes: weights. Where this
// comes behind `wait`, it may also read, past the L1 cache, and write what the kernels before this one did.
__device__ __forceinline__ void trigger()
{
    asm volatile("griddepcontrol.launch_dependents;");
}

// Likewise, behind what the warp that calls it wrote: the next kernel may read that, too, past the L1 cache.
__device__ __forceinline__ void trigger_behind_writes()
{
    __threadfence();
    __syncwarp();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the writes of the kernels before this one can be seen. Every thread calls it, for a grid that ended
// without waiting would let the one after it run too soon.
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

// The current device's multiprocessors; an error where it is no Hopper GPU, or the library has no code for one.
inline cudaError_t find_hopper_processors(int& processors)
{
    int device = 0, major = 0;
    cudaError_t error = cudaGetDevice(&device);
    error = error ? error : cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    error = error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
#ifdef DFLASH_SM90A
    bool const has_kernel = major == 9;
#else
    bool const has_kernel = false;
#endif
    return error ? error : has_kernel ? cudaSuccess : cudaErrorNotSupported;
}

// Sets an attribute of a kernel on the current device, to the same value at every call: a function's attributes hold
// for one device. The driver is asked once for each; a call that failed is not remembered.
template <auto kKernel, cudaFuncAttribute kAttribute>
cudaError_t set_attribute(int value)
{
    static std::atomic<uint64_t> done{0}; // a bit for each of the first 64 devices
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
    if (error != cudaSuccess || done & bit)
    {
        return error;
    }
    error = cudaFuncSetAttribute(kKernel, kAttribute, value);
    if (error == cudaSuccess)
    {
        done |= bit;
    }
    return error;
}

// Lets a kernel's blocks have so many bytes of shared memory.
template <auto kKernel>
cudaError_t allow_shared_bytes(int bytes)
{
    return set_attribute<kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(bytes);
}

// Gives the kernel's blocks multiprocessors that have all of their shared memory as such, where other kernels' blocks
// may find room beside them: a smaller division is that of the kernel alone.
template <auto kKernel>
cudaError_t share_multiprocessors()
{
    return set_attribute<kKernel, cudaFuncAttributePreferredSharedMemoryCarveout>(cudaSharedmemCarveoutMaxShared);
}

// A launch in clusters of so many neighbouring blocks; 1: in none.
struct ClusterLaunch
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    ClusterLaunch(dim3 grid, int cluster, int threads, int shared_bytes, cudaStream_t stream)
    {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = cudaLaunchAttributeClusterDimension;
        attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
        attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream;
        config.attrs = attributes;
        config.numAttrs = cluster > 1 ? 2 : 1;
    }

    ClusterLaunch(ClusterLaunch const&) = delete; // its parts point at each other
    ClusterLaunch& operator=(ClusterLaunch const&) = delete;
};

// In clusters of so many blocks. Of more than eight the kernel must have said that it may.
template <typename... Params, typename... Arguments>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, int cluster, int threads, int shared_bytes,
    cudaStream_t stream, Arguments... arguments)
{
    ClusterLaunch const launch(grid, cluster, threads, shared_bytes, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, static_cast<Params>(arguments)...);
}

template <typename... Params, typename... Arguments>
cudaError_t launch_kernel(
    void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream, Arguments... arguments)
{
    return launch_clusters(kernel, grid, 1, threads, shared_bytes, stream, arguments...);
}

} // namespace dflash
