"""The prompts that the shipped pairs were held out from: 64 of each of four kinds, as JSON lines."""

import json
from pathlib import Path

from trtllm_dflash.errors import EngineError

PROMPTS = Path(__file__).parent / "tiny" / "prompts.jsonl"


def read_prompts(per_kind: int, file: Path = PROMPTS) -> dict[str, list[str]]:
    """Reads the first prompts of each kind from a file of JSON lines with "kind" and "prompt".

    Raises:
        EngineError: the file cannot be read.
    """
    kinds: dict[str, list[str]] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise EngineError(f"{file}: the demo's prompts cannot be read: {error.strerror}") from error
    for line in lines:
        row = json.loads(line)
        kinds.setdefault(row["kind"], []).append(row["prompt"])
    return {kind: prompts[:per_kind] for kind, prompts in kinds.items()}
