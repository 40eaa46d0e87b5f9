"""`AutoModel` and `AutoModelForCausalLM`: a drafter's model card runs here once its code imports them from us.

    from trtllm_dflash import AutoModel, AutoModelForCausalLM, AutoTokenizer

    model = AutoModel.from_pretrained("z-lab/Qwen3-8B-DFlash-b16", trust_remote_code=True, dtype="auto").eval()
    target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="auto").eval()
    output_ids = model.spec_generate(input_ids=..., target=target, max_new_tokens=2048, temperature=0.0, ...)

Nothing is loaded before `spec_generate`: an engine needs target and drafter together.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from trtllm_dflash.build.settings import DEFAULT_MAX_SEQ_LEN
from trtllm_dflash.checkpoint.folder import read_json
from trtllm_dflash.checkpoint.hub import resolve
from trtllm_dflash.checkpoint.quantized import MODELOPT_FILE
from trtllm_dflash.engine.directory import CONFIG_FILE
from trtllm_dflash.engine.dtypes import DTYPES
from trtllm_dflash.errors import RequestError, SettingsError
from trtllm_dflash.llm import LLM, read_input_ids
from trtllm_dflash.models.weights import Precision
from trtllm_dflash.session.device import pick_device
from trtllm_dflash.session.kernels import Kernels

#: Our names of precisions by torch's names of types.
_PRECISIONS: dict[str, Precision] = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


class Checkpoint:
    """A checkpoint by its name, and how its user wants it computed.

    Args:
        name_or_path: a folder, or a Hugging Face name.
        dtype: torch.bfloat16, "float16", ...; "auto": the type that the checkpoint was saved in.
        torch_dtype: `dtype` by its older name.
        device_map: cpu, cuda (or cuda:0), or auto: CUDA where there is one.
        trust_remote_code: may be given; no remote code is ever run.
        others: none; whatever else transformers takes has no meaning here.

    Raises:
        SettingsError: an option is none of these, or has a value that an engine cannot have.
    """

    def __init__(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        device_map: object = "auto",
        trust_remote_code: bool = False,
        **others: object,
    ) -> None:
        if others:
            raise SettingsError(
                f"{next(iter(others))}: has no meaning here, so leave it out; there are dtype, device_map and "
                "trust_remote_code"
            )
        self.name_or_path = os.fspath(name_or_path)
        self.dtype = _dtype_name(dtype or torch_dtype or "auto")
        self.place = _place(device_map)

    @property
    def device(self) -> torch.device:
        """The device that it is computed on. Prompts may be anywhere."""
        return pick_device(self.place)

    @property
    def precision(self) -> Precision | None:
        """The engine's precision; None: a quantized checkpoint's own."""
        if self.dtype != "auto":
            return _PRECISIONS[self.dtype]
        folder = resolve(self.name_or_path)
        config = read_json(folder / CONFIG_FILE)
        text = config.get("text_config")  # of a model of more than text, which may say it there alone
        settings = (config, text) if isinstance(text, dict) else (config,)
        if _first(settings, "quantization_config") is not None or (folder / MODELOPT_FILE).is_file():
            return None
        return _PRECISIONS.get(str(_first(settings, "dtype", "torch_dtype")))

    def eval(self) -> Self:
        """Returns itself: nothing is trained here."""
        return self

    def to(self, device: str | torch.device) -> Self:
        """Computes on another device from the next call on."""
        self.place = _place(device)
        return self


class Drafter(Checkpoint):
    """A drafter, which generates once it is told its target.

    Args:
        kernels: see `LLM.load`.
        options: see `Checkpoint`.
    """

    def __init__(self, name_or_path: str | os.PathLike[str], *, kernels: Kernels = "auto", **options: Any) -> None:
        super().__init__(name_or_path, **options)
        self._kernels = kernels
        self._llm: LLM | None = None
        self._made_of: tuple[str, Precision | None, str] | None = None  # the target, its precision, the device

    def spec_generate(
        self,
        *,
        input_ids: torch.Tensor | Mapping[str, Any],
        target: object,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Generates a reply: input_ids [1, N] -> [1, N + new], of the same type and on the same device.

        The first call loads the engine. It is kept, and loaded again for another target, type or device, or for more
        tokens than it was loaded for.

        Args:
            input_ids: one prompt, or what `apply_chat_template(..., return_tensors="pt")` returns.
            target: from `AutoModelForCausalLM`, ours or transformers'; or a folder or a Hugging Face name. A model of
                transformers lends its `name_or_path`, type and device; its weights are read again from there.
            stop_token_ids: tokens that end the reply; None: the model's own.
            mask_token_id: may be given, and must be the drafter's own.
            seed: of sampling; torch's generators have no part in it.

        Raises:
            RequestError: the pair cannot serve this.
            SettingsError: type or device of target and drafter differ.
            DFlashError: the pair cannot be loaded.
        """
        if not isinstance(max_new_tokens, int):
            raise RequestError(f"{max_new_tokens!r}: is not a number of tokens", "max_new_tokens")
        tokens = read_input_ids(input_ids).shape[1] + max_new_tokens
        llm = self._engine(_as_checkpoint(target), tokens)
        if tokens > llm.config.max_seq_len:
            raise RequestError(
                f"{max_new_tokens}: with the prompt {tokens} tokens; the target takes {llm.config.max_seq_len}",
                "max_new_tokens",
            )
        assert llm.config.drafter is not None
        known = llm.config.drafter.mask_token_id
        if mask_token_id not in (None, known):
            raise RequestError(f"{mask_token_id}: the drafter's own is {known}", "mask_token_id")
        return llm.spec_generate(input_ids, max_new_tokens, temperature, stop_token_ids, seed)

    def close(self) -> None:
        """Frees the engine; the next call loads it again."""
        if self._llm is not None:
            self._llm.close()
        self._llm = None

    def _engine(self, target: Checkpoint, tokens: int) -> LLM:
        """The engine with a target, for a prompt and its reply of so many tokens together."""
        made_of = target.name_or_path, self._precision(target), self._place(target)
        kept = self._llm if self._made_of == made_of else None
        if kept is not None and tokens <= max(DEFAULT_MAX_SEQ_LEN, kept.config.max_seq_len):
            return kept
        self.close()
        name, precision, place = made_of
        longest = tokens if tokens > DEFAULT_MAX_SEQ_LEN else None
        self._llm = LLM.from_pretrained(
            name, self.name_or_path, precision, place, max_seq_len=longest, kernels=self._kernels
        )
        self._made_of = made_of
        return self._llm

    def _precision(self, target: Checkpoint) -> Precision | None:
        if self.dtype not in ("auto", target.dtype):
            raise SettingsError(
                f"dtype: the drafter's is {self.dtype}, the target's {target.dtype}; they compute in one"
            )
        return target.precision

    def _place(self, target: Checkpoint) -> str:
        if "auto" not in (self.place, target.place) and self.place != target.place:
            raise SettingsError(
                f"device_map: the drafter's is {self.place}, the target's {target.place}; they compute on one"
            )
        return target.place if self.place == "auto" else self.place


class AutoModel:
    """Names drafters, as model cards do."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Drafter:
        """Names a drafter; options and errors as of `Drafter`."""
        return Drafter(pretrained_model_name_or_path, **options)


class AutoModelForCausalLM:
    """Names targets, as model cards do."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Checkpoint:
        """Names a target; options and errors as of `Checkpoint`."""
        return Checkpoint(pretrained_model_name_or_path, **options)


def _as_checkpoint(target: object) -> Checkpoint:
    if isinstance(target, Checkpoint):
        return target
    if isinstance(target, str | os.PathLike):
        return Checkpoint(target)
    name = getattr(target, "name_or_path", None)
    if not isinstance(target, torch.nn.Module) or not name:
        reason = "give a folder, a Hugging Face name, or a model with a name_or_path to read its weights from"
        raise RequestError(reason, "target")
    quantized = getattr(target.config, "quantization_config", None) is not None
    return Checkpoint(name, dtype="auto" if quantized else str(target.dtype), device_map=target.device)


def _first(settings: Sequence[Mapping[str, Any]], *keys: str) -> Any:
    """Finds the first value of any of these keys; None: there is none."""
    return next((found[key] for found in settings for key in keys if found.get(key) is not None), None)


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ("auto", *_PRECISIONS):
        raise SettingsError(f"dtype {name}: choose auto, {', '.join(_PRECISIONS)}")
    return name


def _place(device: object) -> str:
    """Reads a device in any of transformers' forms; names it as `LLM.load` does: cpu, cuda or auto."""
    if isinstance(device, Mapping) and list(device) == [""]:  # the whole model
        device = device[""]
    name = f"cuda:{device}" if isinstance(device, int) else "auto" if device is None else str(device)
    name = name.removesuffix(":0")
    if name not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"device_map {name}: choose cpu, cuda or auto; CUDA_VISIBLE_DEVICES says which GPU")
    return name
