"""Products of FP8, NVFP4 and INT4 weights as TensorRT's quantize and dequantize layers."""

import torch

from trtllm_dflash.ops.formats import FP8_BLOCK, NVFP4_BLOCK
from trtllm_dflash.ops.fp8 import Fp8Weight
from trtllm_dflash.ops.int4 import Int4Weight
from trtllm_dflash.ops.linear_weight import Nvfp4Weight, QuantizedWeight
from trtllm_dflash.ops.tensorrt_layers import ITensor, TensorRTLayers


class TensorRTQuantized(TensorRTLayers):
    """Emits products by FP8, NVFP4 and INT4 weights."""

    def _quantized_product(self, name: str, x: ITensor, stored: QuantizedWeight) -> ITensor:
        """Multiplies x [B, N, I] by the weight `name` [O, I]: [B, N, O] in x's type."""
        if isinstance(stored, Fp8Weight):
            return self._fp8_product(name, x, stored)
        if isinstance(stored, Int4Weight):
            numbers = self._int4_numbers(name, stored.values, stored.scale, x.dtype)
            return self._product(x, self._reshape(numbers, (1, *numbers.shape)))
        return self._nvfp4_product(name, x, stored)

    def _fp8_product(self, name: str, x: ITensor, stored: Fp8Weight) -> ITensor:
        """Multiplies x by an FP8 weight: as FP8 too where a calibration found its range, else as it is."""
        if stored.input_scale is not None:
            scale = self._constant(stored.input_scale)
            rounded = self._layer(self.network.add_quantize(x, scale, self.trt.fp8), "input")
            x = self._layer(self.network.add_dequantize(rounded, scale, x.dtype), "input_scale")
        weight = self._fp8_numbers(name, stored, x.dtype)
        return self._product(x, self._reshape(weight, (1, *stored.values.shape)))

    def _fp8_numbers(self, name: str, stored: Fp8Weight, dtype: ITensor) -> ITensor:
        """Emits the dequantized numbers [O, I] of an FP8 weight."""
        values, scale = (
            self._named(name + suffix, x) for suffix, x in ((".weight", stored.values), (".scale", stored.scale))
        )
        layer = self.network.add_dequantize(values, scale, dtype)
        if stored.by_block:
            layer.block_shape = (FP8_BLOCK, FP8_BLOCK)
        else:
            layer.axis = 0
        return self._layer(layer, "scale")

    def _nvfp4_product(self, name: str, x: ITensor, stored: Nvfp4Weight) -> ITensor:
        """Multiplies x by an NVFP4 weight: as NVFP4 too, scaled at run time, where a calibration found its range."""
        if stored.input_scale is not None:
            scale = self._constant(stored.input_scale)
            layer = self.network.add_dynamic_quantize(x, 2, NVFP4_BLOCK, self.trt.fp4, self.trt.fp8)
            layer.set_input(1, scale)
            rounded, scales = self._layer(layer, "input"), layer.get_output(1)
            scales = self._layer(self.network.add_dequantize(scales, scale, x.dtype), "input_scales")
            x = self._layer(self.network.add_dequantize(rounded, scales, x.dtype), "input_scale")
        outputs = stored.scale.shape[0]
        # The layers have one global scale for a weight. Where what is joined has several, the largest goes here and the
        # rest of each to its columns of the product.
        largest = stored.global_scale.amax()
        weight = self._nvfp4_numbers(name, stored.values, stored.scale, largest, x.dtype)
        y = self._product(x, self._reshape(weight, (1, outputs, stored.values.shape[1] * 2)))
        if (stored.global_scale == largest).all():
            return y
        rest = (stored.global_scale / largest).to(self._torch_type(x.dtype))
        return self._binary("PROD", y, self._constant(rest, (1, 1, outputs)), "global_scale")

    def _nvfp4_numbers(
        self, name: str, values: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: ITensor
    ) -> ITensor:
        """Emits the numbers [O, I] of bytes [O, I / 2], their scales [O, I / 16] and the scale [] of those."""
        numbers = self._packed(values, self.trt.fp4, "constant")
        numbers.name = self._unique_name(name + ".weight")
        # The scales' type must be that of what they scale.
        scales = self._named(name + ".scale", scale)
        scales = self._layer(self.network.add_dequantize(scales, self._constant(global_scale), dtype), "scales")
        return self._layer(self.network.add_dequantize(numbers, scales, dtype), "scale")

    def _int4_numbers(self, name: str, values: torch.Tensor, scale: torch.Tensor, dtype: ITensor) -> ITensor:
        """Emits the numbers [O, I] of INT4 values [O, I / 8], as `ops.int4` packs them, and scales [O, I / 32]."""
        # Here a number is stored as itself and 8, there as two's complement: the highest bit is the other one.
        codes = values.contiguous().view(torch.uint8) ^ 0x88
        numbers = self._packed(codes, self.trt.int4, "constant")
        numbers.name = self._unique_name(name + ".weight")
        scales = self._named(name + ".scale", scale.to(self._torch_type(dtype)))
        # Blocks are told by the shapes: TensorRT-RTX 1.7.1 refuses INT4 where `block_shape` is set.
        return self._layer(self.network.add_dequantize(numbers, scales, dtype), "scale")

    def _named(self, name: str, tensor: torch.Tensor) -> ITensor:
        """Emits a named constant."""
        constant = self._constant(tensor)
        constant.name = self._unique_name(name)
        return constant
