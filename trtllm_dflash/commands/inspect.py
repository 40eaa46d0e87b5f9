"""`inspect`: shows an engine directory's configuration and memory."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--caches", is_flag=True, help="Also list K/V caches among inputs and outputs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(engine: Path, caches: bool, as_json: bool) -> None:
    """Say what an engine directory holds, and the memory it needs."""
    from trtllm_dflash.build.inspection import inspect_engine
    from trtllm_dflash.cost.memory import cache_shapes
    from trtllm_dflash.engine.directory import PLUGIN_FILE

    found = inspect_engine(engine)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    config, memory = found.config, found.memory
    pair = f"{config.target.family}, {config.target.layers} layers of {config.target.hidden_size}"
    if found.drafter is not None:
        pair += f"; {found.drafter}"
    rows = {
        "engine": f"{config.name} ({config.backend})",
        "pair": pair,
        "precision": found.precision + (", caches in fp8" if config.kv == "fp8" else ""),
        "tp": str(config.tp),
        "limits": f"{config.max_batch} slots, {config.max_seq_len} tokens, prefill chunks of {config.chunk}",
        "GPU": config.gpu or "any",
        "versions": ", ".join(f"{name} {version}" for name, version in config.versions.items()),
    }
    for rank, plan in enumerate(config.plans):
        rows[f"plan {rank}"] = f"{plan.layers} layers, {plan.weights} weights, compiled in {plan.seconds:.1f} s"
    if config.plugin is not None:
        rows["attention"] = f"plugin, {PLUGIN_FILE} {config.plugin[:12]}"
    if config.transcoded is not None:
        rows["experts"] = str(config.transcoded)
    rows |= {name: f"{size / 1e6:,.1f} MB" for name, size in found.sizes.items()}
    parts = {"weights": memory.weights, "target cache": memory.target_cache, "drafter cache": memory.drafter_cache}
    if found.state:
        parts[f"states ({found.states} of {found.state / 1e6:,.2f} MB)"] = memory.states
    parts |= {"scratch (estimate)": memory.scratch, "graphs (of a GPU)": memory.graphs, "total": memory.total}
    if not found.paging.linear:
        paging = found.paging
        rows["pages"] = f"{paging.pages} of {paging.rows} tokens, at most {paging.width} a slot"
        if paging.window:
            rows["pages"] += f"; {paging.window_pages} of layers that see {paging.window} tokens"
    rows["memory per GPU"] = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items())
    for name, text in rows.items():
        click.echo(f"{name:<18} {text}")
    hidden = set() if caches else {name for name in (*found.io.inputs, *found.io.outputs) if ".layers." in name}
    for side, bindings in (("input", found.io.inputs), ("output", found.io.outputs)):
        for name, binding in bindings.items():
            if name not in hidden:
                shape = "[" + ", ".join("?" if size == -1 else str(size) for size in binding.shape) + "]"
                click.echo(f"{side:<18} {name} {shape} {str(binding.dtype).removeprefix('torch.')}")
    if hidden:
        kept = len(cache_shapes(config).keys() & found.io.inputs.keys())
        others = len(hidden) // 2 - kept
        nets = f" and {others} tensors of states" if others else ""
        if nets and found.copies_states:
            nets = f", updated in place,{nets}, copied behind a step"
        else:
            nets += ", updated in place"
        click.echo(f"{'':<18} and {kept} K/V caches{nets} (--caches lists them)")
