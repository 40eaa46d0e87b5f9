// The library's version, GPU architectures and error texts, for its loader.
#include "dflash_kernels.h"

extern "C" int32_t dflash_abi_version(void)
{
    return DFLASH_ABI_VERSION;
}

extern "C" char const* dflash_architectures(void)
{
    return DFLASH_ARCHITECTURES;
}

extern "C" char const* dflash_error_string(int32_t error)
{
    cudaGetLastError(); // else the next launch of somebody's would be taken for this one, which is told
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
