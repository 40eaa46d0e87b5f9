// Gated delta nets of prompts, for dflash_delta_net: the rows of each segment that its state absorbs at once.
#pragma once

#include "dflash_kernels.h"

#include <cstddef>

namespace dflash
{

// Bytes of scratch.
size_t delta_net_prompt_bytes(dflash_delta_net_params const& p);

// Leaves the states as they are behind those rows, and writes their outputs.
cudaError_t launch_delta_net_prompts(dflash_delta_net_params const& p, void* workspace, cudaStream_t stream);

} // namespace dflash
