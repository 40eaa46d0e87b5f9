"""The hooks that look at a commit."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


def test_hooks_run_the_ruff_that_development_installs():
    pinned = re.findall(r'"(ruff==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    needed = [name for hook in hooks for name in hook["additional_dependencies"] if name.startswith("ruff")]
    assert len(pinned) == 1 and needed == 2 * pinned
