"""Sets what `bench step` measured beside what `build --plan` predicts for the same steps, as Markdown.

trtllm-dflash bench step --shape gpt-oss-20b --batch 1,8,32 --json step.json
trtllm-dflash build --plan --model gpt-oss-20b --gpu h200 --backend torch --max-batch 32 --json > plan.json
python benchmarks/step_and_plan.py step.json plan.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

#: What the one calls a kind of step, and the other.
ARMS = {"plain": "plain", "context only": "draft", "drafted": "draft"}


def table(step: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Each measured step, the plan's for as many rows, and how far off that is.

    Raises:
        SystemExit: they are of different models, ranks or tokens cached.
    """
    measured = step["shape"], step["config"]["tp"], {row["cache_length"] for row in step["rows"]}
    predicted = plan["model"], plan["tp"], {plan["cache_length"]}
    if measured != predicted:
        raise SystemExit(f"error: the steps are of {measured}, the plan of {predicted}")
    seconds = {(point["arm"], point["batch"], point["drafts"] + 1): point for point in plan["points"]}
    lines = [
        "| step | batch | rows | ms | spread of rounds | plan's ms | plan over measured | floor ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in step["rows"]:
        ms, rounds = row["seconds"] * 1e3, row["seconds_by_round"]
        point = seconds.get((ARMS[row["arm"]], row["batch"], row["rows"]))
        said = (
            ("", "")
            if point is None
            else (f"{point['seconds'] * 1e3:.2f}", f"{point['seconds'] / row['seconds']:.2f}x")
        )
        spread = (max(rounds) - min(rounds)) / row["seconds"]
        cells = (
            row["arm"],
            row["batch"],
            row["rows"],
            f"{ms:.2f}",
            f"{spread:.1%}",
            *said,
            f"{row['floor_seconds'] * 1e3:.2f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    memory = step["memory"]
    used = "" if memory["used_bytes"] is None else f"{memory['used_bytes'] / 1e9:.1f} GB of the GPU were in use; "
    lines += ["", f"{used}the plan of this engine counts {memory['planned_bytes'] / 1e9:.1f} GB."]
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", type=Path)
    parser.add_argument("plan", type=Path)
    settings = parser.parse_args()
    step, plan = (json.loads(path.read_text()) for path in (settings.step, settings.plan))
    head = f"{step['machine']['gpu'] or step['machine']['cpu']}, torch {step['versions']['torch']}, {step['session']}"
    print("\n".join([head + ":", "", *table(step, plan)]))


if __name__ == "__main__":
    main()
