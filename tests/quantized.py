"""Checkpoints rewritten in few bits, as they are published; made without ModelOpt."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config
from trtllm_dflash.ops.mxfp4 import E2M1

Tensor = torch.Tensor

E4M3_MOST = 448.0

#: Ends of the names of projections, MiniMax's experts' and gated delta nets' too.
_PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "_qkvz.weight", "_qkv.weight", "_z.weight")

#: What a checkpoint's config.json says of each layout.
METHODS = {
    "tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def quantize_folder(path: Path, layout: str, input_scale: float | None = None, within: str = "") -> dict[str, Tensor]:
    """Rewrites a folder's projections in a layout of `METHODS`, in place; returns what they stand for, by name.

    `input_scale`: of all of them, where a calibration is to have found one. `within`: of names with this part alone.
    """
    tensors = load_file(path / "model.safetensors")
    stands_for = {}
    for name in [name for name in tensors if name.endswith(_PROJECTIONS) and within in name]:
        prefix = name.removesuffix("weight")
        written, stands_for[name] = _LAYOUTS[layout](tensors[name].float())
        tensors |= {prefix + suffix: tensor.contiguous() for suffix, tensor in written.items()}
        if input_scale is not None:
            tensors[prefix + "input_scale"] = torch.tensor(input_scale)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, lambda config: config.update(quantization_config=METHODS[layout]))
    return stands_for


def _tensor(x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = x.abs().max() / E4M3_MOST
    values = (x / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _channel(x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (x.abs().amax(dim=1, keepdim=True) / E4M3_MOST).bfloat16()
    values = (x / scale.float()).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def _blocks(x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = torch.stack([b.abs().amax() for rows in x.split(128) for b in rows.split(128, dim=1)]) / E4M3_MOST
    scale = scale.view(-(-x.shape[0] // 128), -1)
    wide = scale.repeat_interleave(128, 0)[: x.shape[0]].repeat_interleave(128, 1)[:, : x.shape[1]]
    values = (x / wide).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * wide


def _nvfp4(x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    global_scale = x.abs().max() / (6 * E4M3_MOST)
    blocks = x.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(dim=-1) / 6 / global_scale).clamp(min=2**-9).to(torch.float8_e4m3fn)
    wide = (scale.float() * global_scale)[..., None]
    numbers = torch.tensor(E2M1)
    codes = ((blocks / wide)[..., None] - numbers).abs().argmin(dim=-1).flatten(1).to(torch.uint8)
    written = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale, "weight_scale_2": global_scale}
    return written, (numbers[codes.int()].unflatten(1, (-1, 16)) * wide).flatten(1)


_LAYOUTS = {"tensor": _tensor, "channel": _channel, "blocks": _blocks, "nvfp4": _nvfp4}


def quantize_stack(x: Tensor, layout: str) -> dict[str, Tensor]:
    """What an engine stores of experts' matrices [E, O, I] in a layout, by the tensors' last names."""
    each = [_LAYOUTS[layout](matrix)[0] for matrix in x]
    scale = "weight_scale_inv" if layout == "blocks" else "weight_scale"
    stored = {"weight": torch.stack([one["weight"] for one in each])}
    if layout == "nvfp4":
        own = torch.stack([one["weight_scale_2"].expand(x.shape[1]) for one in each])
        return stored | {"scale": torch.stack([one[scale] for one in each]), "global_scale": own}
    scales = [one[scale].float() for one in each]
    return stored | {
        "scale": torch.stack([s if layout == "blocks" else s.flatten().expand(x.shape[1]) for s in scales])
    }
