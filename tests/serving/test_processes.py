"""The processes of a server, as they are found and named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from trtllm_dflash.serving.processes import MARK, find_processes, kill_processes
from trtllm_dflash.serving.triton import STUB

WAIT = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["MODEL"], "the process of model tensorrt_llm"),
        (["-c", WAIT], "the process of a model"),
        ([], "the process of a model"),  # it waits for its input
    ],
)
def test_a_models_process_is_found_whatever_there_is_of_its_words(words, what, tmp_path: Path) -> None:
    """They are not all there while it begins."""
    model = tmp_path / "tensorrt_llm" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text(WAIT)
    name = f"server-{os.getpid()}"
    words = [STUB, *(str(model) if word == "MODEL" else word for word in words)]
    environment = {**os.environ, MARK: name}
    process = subprocess.Popen(words, executable=sys.executable, env=environment, stdin=subprocess.PIPE)
    try:
        wait_until(lambda: [found.what for found in find_processes(name)] == [what], f"it is found as {what}")
    finally:
        kill_processes(name)
        process.communicate()
