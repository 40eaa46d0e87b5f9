"""Errors of a configuration, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from trtllm_dflash.errors import CheckpointError

#: Keys of config.json that fields of a model's shape are read from, where they have other names; by the class.
_DECODER = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}
_KEYS: dict[str, dict[str, str]] = {
    "DecoderConfig": _DECODER,
    "DrafterConfig": {**_DECODER, "target_layers": "num_target_layers", "tap_layers": "target_layer_ids"},
    "DeltaConfig": {
        "key_heads": "linear_num_key_heads",
        "value_heads": "linear_num_value_heads",
        "key_size": "linear_key_head_dim",
        "value_size": "linear_value_head_dim",
        "kernel": "linear_conv_kernel_dim",
    },
    "RopeConfig": {"theta": "rope_theta", "original_max_positions": "original_max_position_embeddings"},
}


def first_problem(error: ValidationError) -> str:
    """Formats the first problem of a validation error: `field: what is wrong`; of config.json by the file's key."""
    problem = error.errors()[0]
    keys = _KEYS.get(error.title, {})
    field = ".".join(keys.get(str(step), str(step)) for step in problem["loc"])
    message = " ".join(problem["msg"].split())
    return f"{field}: {message}" if field else message


@contextmanager
def reading_config(folder: Path) -> Iterator[None]:
    """Turns any error from reading a folder's config.json into a CheckpointError that names the folder."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{folder}: config.json: {first_problem(error)}") from None
    # A list where an object should be, a word or NaN where a number should, and the like.
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: config.json: a setting is of the wrong type ({error})") from None
