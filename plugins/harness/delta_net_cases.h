// Runs the plugin of gated delta nets over steps of several slots, and compares it with the recurrence in float64.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>

// Returns the number of cases; ends the program where one fails. Without a GPU plugins are created, and asked for
// shapes.
size_t check_delta_nets(nvinfer1::IPluginCreatorV3One& creator, bool has_gpu);
