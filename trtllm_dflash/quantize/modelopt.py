"""NVIDIA ModelOpt: finds it, keeps it quiet, and makes its recipes."""

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.extras import pip_install

#: ModelOpt's own recipe of each format: what is rounded, by which scales, found how.
_RECIPES = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}

#: What stays as it is besides what the recipes leave alone (LM head, router): the drafter's projection of all taps.
_LEFT_ALONE = ("fc.*", "model.fc.*", "*embed_tokens*")


def check_modelopt() -> None:
    """Checks that ModelOpt is installed, without importing it, which takes many seconds.

    Raises:
        SettingsError: it is not.
    """
    if find_spec("modelopt") is None:
        raise SettingsError(f"quantize needs NVIDIA ModelOpt: {pip_install('quantization')}")


def load_modelopt() -> ModuleType:
    """Imports `modelopt.torch.quantization`.

    Raises:
        SettingsError: it is not installed, or does not load.
    """
    try:
        with quiet():
            return importlib.import_module("modelopt.torch.quantization")
    except ImportError as error:
        raise SettingsError(f"quantize needs NVIDIA ModelOpt: {pip_install('quantization')} ({error})") from None


def recipe(modelopt: ModuleType, format: str, kv: str | None) -> dict[str, Any]:
    """Makes ModelOpt's configuration for a format, and for K/V caches where `kv` names one."""
    config: dict[str, Any] = copy.deepcopy(getattr(modelopt, _RECIPES[format]))
    if kv is not None:
        config["quant_cfg"] += copy.deepcopy(modelopt.FP8_KV_CFG["quant_cfg"])
    config["quant_cfg"] += [{"quantizer_name": name, "enable": False} for name in _LEFT_ALONE]
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the libraries' messages from standard output, and their progress bars from the terminal, where ours are."""
    from transformers.utils import logging as transformers_logging

    before, bars = logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars:
            transformers_logging.enable_progress_bar()
