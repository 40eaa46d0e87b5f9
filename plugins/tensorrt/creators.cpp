// What TensorRT's plugin registry asks a library for.
#include "block_attention_plugin.h"
#include "delta_net_plugin.h"

extern "C" DFLASH_API void setLoggerFinder(nvinfer1::ILoggerFinder*)
{
}

extern "C" DFLASH_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count)
{
    static dflash::BlockAttentionCreator attention;
    static dflash::DeltaNetCreator delta_net;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention, &delta_net};
    count = 2;
    return creators;
}
