"""Launches every kernel of the library that this GPU runs, on small inputs: what `plugins/sanitize.sh` looks at.

Sizes are the least that take a kernel through all of its ways: rows that end within a tile, work of several passes,
slots of length 0, rows outside of a cache, large scales. That the results are right is for `tests/gpu` to say.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trtllm_dflash import kernels
from trtllm_dflash.errors import EngineError
from trtllm_dflash.kernels.checks import HALVES
from trtllm_dflash.kernels.delta_net import DELTA_ROWS, DELTA_SIZES, DELTA_TAPS
from trtllm_dflash.kernels.library import is_hopper
from trtllm_dflash.kernels.products import SKINNY_GPUS
from trtllm_dflash.ops.expert_tiles import ExpertTiles

Tensor = torch.Tensor

CUDA = torch.device("cuda")
E4M3 = torch.float8_e4m3fn
EPSILON = 1e-6
#: With two stages: for GPUs whose blocks have less than half of an H200's shared memory.
OTHER_GPUS = re.compile(r"attend_kernel<[^<>]*, 2>$")


def main() -> None:
    """Launches all kernels; with --cover says how many, and ends with 1 if one was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-hopper", metavar="LIB", help="run attention of this library too: what others have")
    parser.add_argument("--cover", action="store_true", help="compare what the profiler saw with the library's symbols")
    parser.add_argument("--group", choices=list(GROUPS), help="launch these kernels alone")
    parser.add_argument("--list", action="store_true", help="name racecheck's groups, and launch nothing")
    settings = parser.parse_args()
    if settings.list:
        print("\n".join(RACECHECK_GROUPS))
        return
    groups = [name for name in GROUPS if settings.group in (None, name)]
    if not settings.cover:
        launch_all(groups, settings.without_hopper)
        return
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        launch_all(groups, settings.without_hopper)
    compare(launches_of(trace))


def launch_all(groups: Sequence[str], without_hopper: str | None) -> None:
    """Launches each group in turn, whatever became of those before it; ends with 1 if one failed."""
    failed = [name for name in groups if not launch(name)]
    if without_hopper and "attention" in groups:
        named = os.environ.get(kernels.LIBRARY_VARIABLE, "")
        os.environ[kernels.LIBRARY_VARIABLE] = without_hopper
        failed += [] if launch("attention") else ["attention without Hopper's"]
        os.environ[kernels.LIBRARY_VARIABLE] = named
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print("every group of kernels ran", flush=True)


def launch(name: str) -> bool:
    """Launches one group in both types; says what failed, and whether nothing did."""
    torch.manual_seed(0)
    try:
        for dtype in HALVES:
            GROUPS[name](dtype)
            torch.cuda.synchronize()
    except (RuntimeError, EngineError) as error:
        print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


# -- what ran ----------------------------------------------------------------------------------------------------------


def launches_of(trace: Any) -> list[str]:
    """The names of our kernels that the profiler saw, one for each launch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [short(event["name"]) for event in events if event.get("cat") == "kernel" and "dflash::" in event["name"]]


def kernels_of(library: str) -> set[str]:
    """The names of the kernels in a library: its functions on the host that launch them."""
    symbols = subprocess.check_output(["nm", "--defined-only", library], text=True).split()
    mangled = [x for x in symbols if re.match(r"_ZN6dflash.*\d[a-z_]+_kernel[IE]", x) and not x.endswith(".cold")]
    names = subprocess.check_output(["c++filt"], input="\n".join(mangled), text=True).splitlines()
    found = {short(name) for name in names}
    return {name for name in found if re.search(r"_kernel(<.*>)?$", name) and "launch_kernel" not in name}


def short(name: str) -> str:
    """A demangled kernel without result, parameters, namespace `dflash` and casts of template arguments."""
    name = re.sub(r"\(anonymous namespace\)::|\((bool|int)\)|dflash::", "", name)
    return name.removeprefix("void ").split("(")[0]


def compare(launches: list[str]) -> None:
    """Prints how many of the library's kernels ran; ends with 1 if one did not that this GPU has."""
    library = str(kernels.load().path)
    known, ran = kernels_of(library), set(launches)
    elsewhere = {name for name in known - ran if OTHER_GPUS.search(name)}
    missing = sorted(known - ran - elsewhere)
    for name in missing:
        print(f"not launched: {name}", file=sys.stderr)
    print(f"{len(known & ran)} of the library's {len(known)} kernels ran, in {len(launches)} launches.", end=" ")
    print(f"The other {len(elsewhere)} are for GPUs with less shared memory." if elsewhere else "")
    if missing or not known:
        sys.exit(1)


# -- the kernels -------------------------------------------------------------------------------------------------------


def normal(*shape: int, dtype: torch.dtype, by: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * by).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def step(dtype: torch.dtype) -> None:
    for size in (8, 4096):
        table = normal(50, size, dtype=dtype)
        kernels.embed(table, ints(49, 50, -1, 0).view(2, 2))
        kernels.embed(table, ints(49, 50, -1), 16, 49)
    runs: list[tuple[int, tuple[int, ...]]] = [(1, ()), (9, (33, 1, 700)), (300, (32,) * 20)]
    for decoding, pieces in runs:
        flat_rows(decoding, pieces)
    table = torch.zeros(20, 10, dtype=torch.int32, device="cuda")
    for count in (1, 200):
        kernels.set_pages(table, ints(*(x for i in range(count) for x in (i // 10, i % 10, i))).view(-1, 3))
    caches = [normal(3, heads, 70, size, dtype=dtype) for heads, size in ((1, 64), (5, 128))]
    for rows in (1, 70):
        kernels.PageCopies(caches)(2, 0, rows)
    tree_rows(1, (), 16, caches)
    tree_rows(9, (33, 1), 64, caches)


def tree_rows(decoding: int, pieces: Sequence[int], block: int, caches: Sequence[Tensor]) -> None:
    """A step of trees: its begin, acceptance as it is and imposed, moves within pages and across them, and its end."""
    parents = random_trees(decoding + len(pieces), block)
    layout, tokens, kept_start = lay_out(decoding, pieces, block, parents)
    targets = torch.zeros_like(layout.logit_rows)
    kernels.accept_paths(layout, targets)
    pages = kernels.Pages(torch.zeros(decoding + len(pieces), 10, dtype=torch.int32, device="cuda"), caches[0].shape[2])
    moves = kernels.PathMoves(caches[:1], pages, caches[1:], pages)
    taps = [normal(len(layout.token_ids), 8, dtype=torch.float16)] * 3
    found = kernels.accept_paths(layout, targets, layout.segments[:, 3].contiguous(), taps, moves)
    drafts = torch.zeros(len(layout.segments), block, dtype=torch.int32, device="cuda")
    kept = tokens, kept_start, 63, targets, found.accepted, found.next_start, drafts, block
    for given in (drafts, None):
        send(kernels.end_rows(layout, *kept, given, parents))
    ranks = kernels.accept_paths(layout, targets).ranks
    kernels.end_rows(layout, *kept, drafts, parents, ranks, depths=block - 1)


def send(decided: Tensor) -> None:
    """Has the host's memory written to, which is held until it has been."""
    host = torch.empty(decided.shape, dtype=torch.int32, pin_memory=True)
    kernels.send(decided, host)
    torch.cuda.synchronize()


def random_trees(slots: int, block: int) -> Tensor:
    """Each row's parent, of a tree of `block` rows a slot."""
    return torch.randint(block, (slots, block), device="cuda").int() % ints(*range(1, block + 1))


def flat_rows(decoding: int, pieces: Sequence[int], block: int = 8) -> None:
    """A step's begin, acceptance and end; it keeps the rows of the slots that are not idle."""
    layout, tokens, kept_start = lay_out(decoding, pieces, block)
    targets = torch.zeros_like(layout.logit_rows)
    accepted, _, _, next_start = kernels.accept_rows(layout, targets)
    drafts = torch.zeros(len(layout.segments), block, dtype=torch.int32, device="cuda")
    send(kernels.end_rows(layout, tokens, kept_start, 63, targets, accepted, next_start, drafts, block))
    shared_rows(layout, accepted, next_start, decoding)


def shared_rows(layout: kernels.Rows, accepted: Tensor, next_start: Tensor, decoding: int) -> None:
    """Division of a step's rows, and of its blocks', by chances of drafts, some of which are guesses."""
    segments, drafts = len(layout.segments), 7
    numbers = [torch.rand(*shape, device="cuda") for shape in ((segments, drafts), (segments,), (drafts,), (drafts,))]
    kept = kernels.Foretold(numbers[0] - 0.2, numbers[1] - 1.0, numbers[2] + 1, numbers[3], 400.0)
    words = torch.cat([layout.segments[:, [0, 3, 0, 3]] * ints(1, 1, 0, 0) + ints(0, 0, -1, 20)]).flatten()
    kernels.divide_rows(words.contiguous(), kept, decoding, 20)
    rows = 3 * segments
    blocks = kernels.divide_blocks(layout, kept, next_start, accepted, rows, 5)
    ids, log_probs = torch.zeros(rows, 8, dtype=torch.int32, device="cuda"), -torch.rand(rows, 8, device="cuda")
    kernels.keep_drafts(layout, blocks, kept, accepted, ids[:, 0], log_probs[:, 0])


def lay_out(
    decoding: int, pieces: Sequence[int], block: int = 8, parents: Tensor | None = None
) -> tuple[kernels.Rows, Tensor, Tensor]:
    """Begins a step of slots that decode 0, 1, ... `block`, 0, ... rows and pieces of so many tokens, with padding.

    Also returns what slots kept: tokens and start.
    """
    counts, padding = [slot % (block + 1) for slot in range(decoding)], 5
    words = [x for slot, count in enumerate(counts) for x in (slot, count, -1, count)]
    words += [x for i, count in enumerate(pieces) for x in (decoding + i, count, 5 * i, 1)]
    words += range(sum(pieces))
    slots = decoding + len(pieces)
    tokens, kept_start = ints(*range(slots * block)).view(slots, block), ints(*range(slots))
    layout = kernels.begin_rows(
        ints(*words),
        tokens,
        kept_start,
        segments=slots,
        decode_segments=decoding,
        pieces=len(pieces),
        rows=sum(counts) + sum(pieces) + padding,
        logit_rows=sum(counts) + len(pieces) + padding,
        cuts=sum(-(-count // kernels.MAX_ROWS) for count in pieces) + padding,
        seeds=kept_start.long(),
        parents=parents,
    )
    return layout, tokens, kept_start


def norms(dtype: torch.dtype) -> None:
    for size in (8, 1000, 8192, 16384, 32768):
        x, y = (normal(2, 5, size, dtype=dtype) for _ in range(2))
        for kind in (dtype, torch.float32):
            weight = normal(size, dtype=kind)
            kernels.rms_norm(x[:, 1:], weight, EPSILON)
            kernels.add_rms_norm(x, y, weight, EPSILON)
            kernels.add_parts_norm(x, normal(3, 2, 5, size, dtype=torch.float32), weight, EPSILON)
            kernels.add_normed(x, weight, EPSILON, y, y.view(-1)[:1])
            kernels.add_normed(x, weight, EPSILON, scale=0.5)
            kernels.quantize_rows(x.view(10, size), kernels.Norm(weight, EPSILON))
            if size % 128 == 0:
                kernels.quantize_blocks(x.view(10, size), kernels.Norm(weight, EPSILON))
        kernels.quantize_rows(x.view(10, size))
        if size % 128 == 0:
            kernels.quantize_blocks(x.view(10, size))
    if dtype == torch.bfloat16:
        for size, kind, count in product((1024, 2880, 4096), (dtype, torch.float32), (5, 17)):
            x, y = (normal(1, count, size, dtype=dtype) for _ in range(2))
            norm, router, bias = (normal(*shape, dtype=dtype) for shape in ((size,), (40, size), (40,)))
            kernels.router(x, y, norm.to(kind), EPSILON, router, bias)
            kernels.router(x, None, norm.to(kind), EPSILON, router)
    for size in (8, 1000, 12288):
        x = normal(1, 5, 2 * size, dtype=dtype)
        kernels.swiglu(x)
        kernels.swiglu(x, gelu=True)
        for gates in (x[..., size:], x[..., :1]):
            rows = x[..., :size].contiguous()
            kernels.gate(rows, gates, rows)
            kernels.gate(rows, gates)


def choices(dtype: torch.dtype) -> None:
    for kind in (dtype, torch.float32):
        kernels.cap(normal(3, 5000, dtype=kind), 30.0)
    for size in (1, 7, 2048, 4097, 32000):
        kernels.argmax(normal(2, 3, size, dtype=dtype))
        kernels.argmax(normal(2, 3, size, dtype=torch.float32))
    for size in (8, 2048, 4097, 32000):
        ids, best, total = kernels.top_ids(normal(2, 3, size, dtype=dtype))
        kernels.top_ids(normal(2, 3, size, dtype=torch.float32), normalized=True)
        for nodes in (3, 17):
            parents, places = ints(-1, *range(16)), ints(*range(17))
            kernels.grow_tree(parents, places, nodes, -15.0, 1e-3, ints(1, 2), best - total[..., None], ids)
    for size in (1, 7, 2048, 4097):
        for kind in (dtype, torch.float32):
            kernels.log_probabilities(normal(3, size, dtype=kind), ints(0, size - 1, size // 2), min(size, 20))
            shape(normal(1, size, dtype=kind).expand(9 * 8 + 7, size).contiguous())


def shape(logits: Tensor) -> None:
    """Penalties of every other slot, and masks of every other row; then what is kept of the replies."""
    decoding, vocabulary, generator = 17, logits.shape[1], torch.Generator("cuda").manual_seed(1)
    layout, _, _ = lay_out(decoding, (3, 1))
    slots, logits = decoding + 2, logits[: len(layout.logit_rows)]

    def some(most: int, *shape: int) -> Tensor:
        return torch.randint(-1, most, shape, generator=generator, dtype=torch.int32, device="cuda")

    layout.token_ids.remainder_(vocabulary)
    kept = kernels.KeptPenalties(
        penalized=(torch.arange(slots, device="cuda") % 2).int(),
        presence=normal(slots, dtype=torch.float32),
        frequency=normal(slots, dtype=torch.float32),
        repetition=normal(slots, dtype=torch.float32).abs() + 0.5,
        counts=some(3, slots, vocabulary).clamp(min=0),
        in_prompt=some(1, slots, vocabulary) < 0,
        bias=normal(slots, vocabulary, dtype=torch.float32),
        ends=some(1, slots, vocabulary) < 0,
        ends_from=some(40, slots),
        runs=some(vocabulary, slots, 64, 8),
        recent=some(vocabulary, slots, 7),
    )
    masks = kernels.RowMasks(some(1 << 30, 5, -(-vocabulary // 32)), some(5, len(logits)))
    kernels.shape_logits(logits, layout, kept, masks, 0)
    kernels.argmax(logits[None], kernels.shape_changed_logits(logits, layout, kept, masks, 0))
    kernels.keep_replies(layout, kept, torch.zeros(slots, dtype=torch.int32, device="cuda"))


def append(dtype: torch.dtype) -> None:
    """Committed context rows and a block's, and each alone; some before a cache's first row or past its last."""
    slots, heads, kv_heads, length, rows = 3, 8, 2, 60, 16
    start, committed = ints(-3, 17, 40), ints(1, 8, 16)
    for size in kernels.ALL_HEAD_SIZES:
        qkv = normal(slots, rows, (heads + 2 * kv_heads) * size, dtype=dtype)
        kv = normal(slots, rows, 3, 2, kv_heads * size, dtype=dtype)  # of three layers
        context = kv[:, :, 1, 0], kv[:, :, 1, 1]
        cos, sin = (normal(length, size // 2, dtype=dtype) for _ in range(2))
        norm = normal(size, dtype=dtype)
        for scales in (None, make_scales()):
            keys, values = make_caches((slots, kv_heads, length, size), dtype, scales)
            for weight in (None, norm):
                run = kernels.Append(cos, sin, weight, weight, EPSILON, scales)
                run(keys, values, start, heads, qkv, context, committed)
                run(keys, values, start, heads, qkv[:, :1])
                run(keys, values, start, heads, context=context)
                for pieces in ((33, 70, 130), (1400,)):  # a head of a row each, and several
                    append_flat(run, heads, kv_heads, pieces)
                append_flat(run, heads, kv_heads, (33, 70), random_trees(9 + 2, 8))
        keys, values = make_caches((slots, kv_heads, length, size), dtype, None)
        shared = qkv[..., : (heads + kv_heads) * size]  # keys as values, which are normed
        kernels.Append(cos, sin, norm, norm, EPSILON, None, True, True)(keys, values, start, heads, shared)
        partial_cos, partial_sin = (table[:, : size // 4].contiguous() for table in (cos, sin))
        run = kernels.Append(partial_cos, partial_sin, norm.float(), norm.float(), EPSILON)
        run(keys, values, start, heads, qkv, context, committed)


def append_flat(
    run: kernels.Append, heads: int, kv_heads: int, pieces: Sequence[int], parents: Tensor | None = None
) -> None:
    """A step's rows into pages, context rows all and committed, and a block behind them; some past the last page."""
    layout, page_rows = lay_out(9, pieces, parents=parents)[0], 64
    slots, width, dtype, size = len(layout.segments), max(pieces) // page_rows, run.cos.dtype, 2 * run.cos.shape[1]
    pages = kernels.Pages(random_table(slots, width), page_rows)
    keys, values = make_caches((slots * width, kv_heads, page_rows, size), dtype, run.scales)
    rows, every = len(layout.row_segment), heads + 2 * kv_heads
    out = normal(rows, heads * size, dtype=dtype)
    run.rows(keys, values, pages, layout, heads, normal(rows, every * size, dtype=dtype), out)
    kv = normal(1, rows, 3, 2, kv_heads * size, dtype=dtype)  # of three layers
    context, committed = (kv[:, :, 1, 0], kv[:, :, 1, 1]), (layout.segments[:, 3] + 1) // 2
    run.context(keys, values, pages, layout, heads, context)
    run.context(keys, values, pages, layout, heads, context, committed)
    qkv = normal(slots, 8, every * size, dtype=dtype)
    run.block(keys, values, pages, layout, heads, qkv, context, committed)


def single_rows(dtype: torch.dtype) -> None:
    """Clusters of 16, 8, 4 and 2 blocks; keys in one round, several and none; a slot that several clusters share."""
    for size, (slots, kv_heads) in product((64, 128), ((1, 2), (1, 8), (8, 4), (8, 8), (2, 1))):
        page_rows, group = 128, 8
        starts = [0, 40, 1100, 3000, 64, 129, 700, 9][-slots:] if slots > 2 else [1000, 30000][-slots:]
        width = max(starts) // page_rows + 1
        pages = kernels.Pages(random_table(slots, width), page_rows)
        keys, values = make_caches((slots * width, kv_heads, page_rows, size), dtype, None)
        cos, sin = (normal(max(starts) + 1, size // 2, dtype=dtype) for _ in range(2))
        norm = normal(size, dtype=dtype)
        append = kernels.Append(cos, sin, norm, norm, EPSILON)
        layout = lay_out_single(starts)
        heads, arrivals = group * kv_heads, kernels.row_arrivals(keys.device)
        qkv = normal(slots, (heads + 2 * kv_heads) * size, dtype=dtype)
        out = normal(slots, heads * size, dtype=dtype)
        sinks = torch.randn(heads, device="cuda")
        for window, more in product((0, 200), (None, sinks)):
            places = keys, values, pages, layout, heads, qkv, out, arrivals
            kernels.attend_single_rows(append, *places, window, more)


def lay_out_single(starts: Sequence[int]) -> kernels.Rows:
    """Begins a step of one row a slot; of several slots the second is idle, and leaves a row of padding."""
    slots = len(starts)
    counts = [int(slot != 1) for slot in range(slots)]
    words = ints(*(x for slot, count in enumerate(counts) for x in (slot, count, -1, count)))
    tokens, kept_start = ints(*range(slots * 8)).view(slots, 8), ints(*starts)
    return kernels.begin_rows(words, tokens, kept_start, slots, slots, 0, slots, slots, 0)


def random_table(slots: int, width: int) -> Tensor:
    """A page table in which each page is one slot's."""
    return torch.randperm(slots * width, device="cuda").int().view(slots, width)


def make_scales() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.031, device="cuda"), torch.tensor(0.017, device="cuda")


def make_caches(shape: tuple[int, ...], dtype: torch.dtype, scales: kernels.Scales) -> tuple[Tensor, Tensor]:
    """Keys and values, of the rows' type or in E4M3."""
    kind = dtype if scales is None else E4M3
    return normal(*shape, dtype=kind), normal(*shape, dtype=kind)


def sums(dtype: torch.dtype) -> None:
    """All-reduces of a rank whom the others told before that their parts lie ready: no kernel waits for another."""
    told_at = 2 * kernels.ALL_REDUCE_BYTES
    for kind in (dtype, torch.float32):
        for ranks in kernels.ALL_REDUCE_RANKS:
            for nbytes in (16, 8176, kernels.ALL_REDUCE_BYTES):
                size = (ranks, kernels.ALL_REDUCE_SHARED)
                shared = list(torch.zeros(size, dtype=torch.uint8, device="cuda"))
                # Of 64 blocks, 8 ranks each: the first call.
                shared[1][told_at : told_at + 64 * 8 * 4].view(torch.int32).fill_(1)
                reduce = kernels.AllReduce([x.data_ptr() for x in shared], 1)
                reduce(normal(nbytes // kind.itemsize, dtype=kind))


def experts(dtype: torch.dtype, weight: str) -> None:
    """Few and many rows; experts of which a rank has some; groups that share an expert; inputs of several units."""
    clamped = kernels.Routing(16, 0, 16, 4, True, (1.702, 7.0))
    softmax = kernels.Routing(16, 0, 16, 4, False)
    for rows in (1, 3):
        mixture(dtype, weight, rows, 320, 96, clamped)
    mixture(dtype, weight, 1, 2880, 96, kernels.Routing(32, 8, 8, 4, True))
    mixture(dtype, weight, 40, 320, 96, softmax, logits=torch.float32, biased=False)
    mixture(dtype, weight, 300, 64, 32, clamped, spread=0.0)
    mixture(dtype, weight, 8, 2880, 96, kernels.Routing(32, 8, 8, 4, True))
    mixture(dtype, weight, 33, 96, 224, kernels.Routing(256, 200, 4, 8, True))
    if weight == "mxfp4":
        mixture(dtype, weight, 20, 320, 64, clamped, scales=(80, 129))
    scaled = kernels.Routing(16, 0, 16, 4, True, gelu=True, scales=normal(16, dtype=dtype))
    for rows in (3, 9, 40, 130):
        mixture(dtype, weight, rows, 320, 96, scaled, biased=False)
    for rows in (1, 3):
        mixture(dtype, weight, rows, 320, 96, kernels.Routing(256, 0, 256, 8, True, has_shared=True))
    mixture(dtype, weight, 300, 64, 32, kernels.Routing(16, 4, 8, 4, True, has_shared=True))
    correction = normal(256, dtype=torch.float32)
    of_rows = ((1, dtype, True), (3, dtype, True), (40, torch.float32, False), (300, dtype, True))
    for rows, logits, normalized in of_rows:
        routing = kernels.Routing(256, 8, 64, 8, normalized, correction=correction, scale=2.8)
        mixture(dtype, weight, rows, 128, 64, routing, logits)


def int4_experts(dtype: torch.dtype) -> None:
    """Groups of up to 8 rows and of up to 16; choice by sigmoids and by softmax; SiLU, GELU and a clamp."""
    correction = normal(384, dtype=torch.float32)
    for rows, logits in ((3, dtype), (40, torch.float32), (500, dtype)):
        routing = kernels.Routing(384, 8, 64, 8, True, correction=correction, scale=2.8)
        mixture(dtype, "int4", rows, 512, 256, routing, logits)
    for rows in (8, 40):
        mixture(dtype, "int4", rows, 256, 256, kernels.Routing(16, 0, 16, 4, False, gelu=True), biased=False)
        mixture(dtype, "int4", rows, 1024, 256, kernels.Routing(16, 4, 8, 4, True, (1.702, 7.0)), spread=0.0)


def mixture(
    dtype: torch.dtype,
    weight: str,
    rows: int,
    hidden: int,
    columns: int,
    routing: kernels.Routing,
    logits: torch.dtype | None = None,
    biased: bool = True,
    spread: float = 1.0,
    scales: tuple[int, int] = (118, 122),
) -> None:
    """One feed-forward of random experts; equal logits where spread is 0."""

    count = routing.matrices

    def matrix(outputs: int, inputs: int) -> kernels.Matrix:
        bias = normal(count, outputs, dtype=dtype) if biased else None
        if weight == "int4":
            words = torch.randint(2**31, (count, outputs, inputs // 8), dtype=torch.int32, device="cuda")
            return kernels.Matrix(words, normal(*words.shape[:2], inputs // 32, dtype=torch.bfloat16, by=0.01), bias)
        if weight in ("mxfp4", "nvfp4"):
            return packed_matrix(outputs, inputs, bias)
        numbers = normal(count, outputs, inputs, dtype=dtype, by=0.05)
        if weight == "numbers":
            return kernels.Matrix(numbers, None, bias)
        shape = (-(-outputs // 128), -(-inputs // 128)) if weight == "fp8 blocks" else (outputs,)
        scale = torch.rand(count, *shape, device="cuda")
        return kernels.Matrix(numbers.to(torch.float8_e4m3fn), scale, bias)

    def packed_matrix(outputs: int, inputs: int, bias: torch.Tensor | None) -> kernels.Matrix:
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8, device="cuda")
        told = outputs == 2 * columns, dtype == torch.bfloat16
        if weight == "mxfp4":
            of_blocks = torch.randint(*scales, blocks.shape[:3], dtype=torch.uint8, device="cuda")
            return kernels.Matrix(ExpertTiles.of(blocks, of_blocks, *told).tiles, None, bias)
        scale = torch.rand(count, outputs, inputs // 16, device="cuda").to(E4M3)
        row_scales = torch.rand(count, outputs, device="cuda")
        made = ExpertTiles.of(blocks, scale, *told, row_scales)
        return kernels.Matrix(made.tiles, None, bias, row_scales)

    matrices = matrix(2 * columns, hidden), matrix(hidden, columns)
    x, scores = normal(rows, hidden, dtype=dtype), normal(rows, routing.experts, dtype=logits or dtype, by=spread)
    for many in (False, True):
        moe = kernels.MoE(routing, *matrices, many)
        if not many or moe.takes(x, scores):  # Hopper alone has those for many rows
            moe(x, scores)
            gates = scores[:, :1] if routing.has_shared else None
            for somebodys in (rows, rows // 2, 0):
                moe(x, scores, gates, x, ints(*(i if i < somebodys else -1 for i in range(rows))))


def attention(dtype: torch.dtype) -> None:
    """Packed rows of one tile to many, and as many slots as each way of combining partial results takes."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for size in kernels.ALL_HEAD_SIZES:
        many = [most * processors // (2 * size) + 1 for most in (4, 8)]  # slots of 2 heads of 128 packed rows
        for scales in (None, make_scales()):
            cache = make_caches((1, 1, 64, size), dtype, scales)[0]
            if not kernels.takes_heads(size, dtype, cache):
                continue
            attend(dtype, size, scales, [300, 1, 65], rows=1, group=4)
            attend(dtype, size, scales, [300, 5, 65], rows=8, group=1, adds=True)
            attend(dtype, size, scales, [700, 0, 64], rows=8, group=4, causal=False)
            attend(dtype, size, scales, [128_000 // size] * 20, rows=16, group=4)  # rings of tiles go round
            attend(dtype, size, scales, [129, 1000, 17], rows=16, group=4, window=100, has_sinks=True)
            attend(dtype, size, scales, [40, 0, 2049], rows=32, group=5, window=30)
            for slots in many:
                attend(dtype, size, scales, [200] * slots, rows=16, group=8)
            # More (slot, head)s than ranges, and an idle slot: equal ones, and others that are dealt out.
            attend(dtype, size, scales, [0] + [130] * processors, rows=32, group=8, has_sinks=True)
            for slots in (28, 44):
                attend(dtype, size, scales, [0] + [130 + 61 * i % 300 for i in range(slots)], rows=32, group=8)
            for page_rows in (64, 192):
                attend_flat(dtype, size, scales, [(700, 5), (0, 0), (63, 1), (64, 16)], 16, page_rows)
                attend_flat(dtype, size, scales, [(700, 5), (0, 0), (3, 1)], 8, page_rows, block=True)
                attend_flat(dtype, size, scales, [(700, 16), (0, 0), (60, 16)], 16, page_rows, window=100, tree=True)
                attend_flat(dtype, size, scales, [(70, 64), (0, 3)], 64, page_rows, tree=True)
            cuts = [(first, min(32, 300 - first)) for first in range(0, 300, 32)]
            attend_flat(dtype, size, scales, cuts, 32, 64, window=100, has_sinks=True)
            attend_flat(dtype, size, scales, cuts, 32, 371)  # a page holds all of a slot


def exact_attention(dtype: torch.dtype) -> None:
    """One row block to four; cuts and tails apart, together, and all of a head; trees; a page and several; sinks.

    Windows that begin in a cut's first tile and in others; FP8 caches.
    """
    if not is_hopper(CUDA):
        return
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for size, scales in product(kernels.HEAD_SIZES, (None, make_scales())):
        few = [(1500, 5), (0, 0), (63, 1), (511, 16), (512, 1), (700, 9), (40, 12)]
        for rows, group in ((16, 4), (16, 1), (17, 4), (32, 4), (32, 5), (32, 8)):
            attend_flat(dtype, size, scales, few, rows, 64, group=group, exact=True)
        attend_flat(dtype, size, scales, [(900, 32), (0, 32)], 32, 2048, group=8, has_sinks=True, exact=True)
        for rows in (16, 32, 64):
            attend_flat(dtype, size, scales, [(1500, rows), (0, 0), (500, rows)], rows, 64, tree=True, exact=True)
        for window in (16, 128, 700):
            attend_flat(dtype, size, scales, few, 16, 64, window=window, exact=True)
        attend_flat(dtype, size, scales, few + [(600, 2)] * processors, 16, 64, exact=True)
        attend_flat(dtype, size, scales, few + [(600, 32)] * (processors // 4), 32, 64, group=8, exact=True)


def latents(dtype: torch.dtype) -> None:
    """One row block and many, slots of length 0, and as many slots as each way of combining partial results takes."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for heads, rows, lengths in (
        (8, 1, [700, 0, 64]),
        (8, 2, [3000] * 13),
        (8, 4, [64 * 70]),
        (8, 16, [300, 16, 129]),
        (8, 16, [4900]),
        (1, 1, [64, 1]),
        (16, 32, [100, 700]),
        (64, 1, [700, 65]),
        (64, 16, [2000, 1990]),
        (5, 7, [130] * 2 * processors),
    ):
        cache = normal(len(lengths), 1, max(lengths), 576, dtype=dtype)
        norm, cos, sin = (normal(*shape, dtype=dtype) for shape in ((512,), (5000, 32), (5000, 32)))
        append = kernels.LatentAppend(norm, cos, sin, 1e-6)
        projected = normal(len(lengths), rows, heads * 192, dtype=dtype), normal(len(lengths), rows, 576, dtype=dtype)
        q = append(*projected, ints(*lengths) - rows // 2, heads, cache).normal_()
        if kernels.takes_latent(cache, 512, 64):  # Hopper alone has attention
            kernels.attend_latent(q.transpose(1, 2), cache, ints(*lengths), 0.1)


def attend(
    dtype: torch.dtype,
    size: int,
    scales: kernels.Scales,
    lengths: list[int],
    rows: int,
    group: int,
    causal: bool = True,
    window: int = 0,
    has_sinks: bool = False,
    adds: bool = False,
) -> None:
    """One call over caches that end with the longest slot, inside of a tile; or, where it adds, 3 rows behind it."""
    kv_heads = 2
    heads = group * kv_heads
    added = torch.ones(len(lengths), dtype=torch.int32, device="cuda") if adds else None
    q = normal(len(lengths), rows, heads, size, dtype=dtype).transpose(1, 2)
    keys, values = make_caches((len(lengths), kv_heads, max(lengths), size), dtype, scales)
    sinks = normal(heads, dtype=torch.float32) if has_sinks else None
    kernels.attention(q, keys, values, ints(*lengths), causal, window, sinks, added, 2 * adds, scales, 0.1)


def attend_flat(
    dtype: torch.dtype,
    size: int,
    scales: kernels.Scales,
    runs: list[tuple[int, int]],
    rows: int,
    page_rows: int,
    block: bool = False,
    window: int = 0,
    has_sinks: bool = False,
    tree: bool = False,
    exact: bool = False,
    group: int = 4,
) -> None:
    """One call over segments of (start, count), padding rows, and caches in pages; or over a block of rows of each."""
    kv_heads, heads, slots = 2, 2 * group, len(runs)
    ends = list(accumulate((count for _, count in runs), initial=0))
    places = zip(range(slots), (start for start, _ in runs), ends, (count for _, count in runs), strict=False)
    segments = ints(*(x for place in places for x in place)).view(-1, 4)
    table = random_table(slots, -(-max(start + 2 * rows for start, _ in runs) // page_rows))
    keys, values = make_caches((table.numel(), kv_heads, page_rows, size), dtype, scales)
    q = normal(rows * slots if block else ends[-1] + 3, heads, size, dtype=dtype)
    kernels.attend_rows(
        q,
        keys,
        values,
        kernels.Pages(table, page_rows),
        segments,
        rows,
        out=torch.empty(len(q), heads * size, dtype=dtype, device="cuda"),
        causal=not block,
        window=window,
        sinks=normal(heads, dtype=torch.float32) if has_sinks else None,
        scales=scales,
        added=segments[:, 3] // 2 if block else None,
        block=rows if block else 0,
        row_path=random_paths([*(count for _, count in runs), 3]) if tree else None,
        exact=exact,
    )


def random_paths(counts: Sequence[int]) -> Tensor:
    """Makes paths of trees of so many rows, up to 64 of which one has up to 16: int64, one after the other."""
    paths: list[int] = []
    for count in counts:
        tree: list[int] = []
        for row in range(count):
            shallow = [path for path in tree if path.bit_count() < 16]
            tree.append(1 << row | (shallow[-1 - row * row % min(3, len(shallow))] if row else 0))
        paths += tree
    return torch.tensor([path - (path >> 63 << 64) for path in paths], device="cuda")


def prompts(dtype: torch.dtype) -> None:
    """Few items and several a block; tiles in one page and in two; groups that do not fill an item; a window, sinks."""
    if not is_hopper(CUDA):
        return
    for size in kernels.HEAD_SIZES:
        for page_rows in (64, 192, 128, 1100):
            attend_prompts(dtype, size, [(700, 300), (0, 0), (63, 1), (64, 130)], 4, page_rows)
        attend_prompts(dtype, size, [(700, 90), (0, 33)], 5, 64, window=100, has_sinks=True)
        attend_prompts(dtype, size, [(0, 5)] * torch.cuda.get_device_properties(0).multi_processor_count, 8, 64)


def attend_prompts(
    dtype: torch.dtype,
    size: int,
    runs: list[tuple[int, int]],
    group: int,
    page_rows: int,
    window: int = 0,
    has_sinks: bool = False,
) -> None:
    """One call over prompts of (start, count), padding rows, and caches in pages."""
    kv_heads, slots = 2, len(runs)
    heads = group * kv_heads
    ends = list(accumulate((count for _, count in runs), initial=0))
    segments = ints(*(x for slot, (start, count) in enumerate(runs) for x in (slot, start, ends[slot], count)))
    table = random_table(slots, -(-max(map(sum, runs)) // page_rows))
    keys, values = make_caches((table.numel(), kv_heads, page_rows, size), dtype, None)
    q = normal(ends[-1] + 3, heads, size, dtype=dtype)
    kernels.attend_prompts(
        q,
        keys,
        values,
        kernels.Pages(table, page_rows),
        segments.view(-1, 4),
        torch.empty(len(q), heads * size, dtype=dtype, device="cuda"),
        window,
        normal(heads, dtype=torch.float32) if has_sinks else None,
    )


def states(dtype: torch.dtype) -> None:
    """Nets of every size: slots that begin, go on, rest and read prompts, and rows of nobody."""
    for kind in kinds_beside(dtype):
        for size in DELTA_SIZES:
            delta_net(kind, size, 2, 4, MIXED_RUNS)
        delta_net(kind, 128, 2, 16, MIXED_RUNS)
        for keeps in (0, DELTA_ROWS):  # each state written, or but the last one's
            delta_net(kind, 128, 2, 6, [(0, 0, 1, 0), (9, 2, 1, 0), (7, 7, 0, 0), (30, 14, 1, 0)], keeps=keeps)


def states_of_many(dtype: torch.dtype) -> None:
    """The same of so many heads of 128 that a block has all of their values."""
    for kind in kinds_beside(dtype):
        delta_net(kind, 128, 2, 164, MIXED_RUNS)


def kinds_beside(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """A type, and FP32 beside the first: of both would be twice."""
    return (dtype, torch.float32) if dtype == HALVES[0] else (dtype,)


def states_of_rows(dtype: torch.dtype, value_heads: int) -> None:
    """Nets of heads of 128 of 16, 40 and 200 rows each, a value head a key and several; few rows that are kept."""
    for rows in (16, 40):
        delta_net(dtype, 128, 2, value_heads, [(0, 0, rows, 0), (9, 2, rows, 0)])
    if value_heads <= 16:  # more take racecheck too long
        delta_net(dtype, 128, 2, value_heads, [(24, 24, 200, 0)])
    delta_net(dtype, 128, value_heads, value_heads, MIXED_RUNS)
    delta_net(dtype, 128, 1, value_heads, [(9, 7, 1, 0), (20, 16, 20, 2)], pending=4)


#: What slots do in a step of a delta net: start, the position that the state stands at, rows, and padding behind them.
MIXED_RUNS = [(0, 0, 16, 0), (9, 2, 1, 0), (40, 24, 35, 0), (7, 7, 0, 0), (5, 5, 18, 3)]


def delta_net(
    dtype: torch.dtype,
    size: int,
    key_heads: int,
    value_heads: int,
    runs: Sequence[tuple[int, int, int, int]],
    pending: int = DELTA_ROWS,
    keeps: int = 0,
) -> None:
    """One net over a step of slots' runs, as in MIXED_RUNS; then where the states stand."""
    slots, channels, before = len(runs), (2 * key_heads + value_heads) * size, DELTA_TAPS - 1

    def numbers(*shape: int) -> Tensor:
        return normal(*shape, dtype=torch.float32)

    net = kernels.DeltaNet(
        conv=normal(channels, 1, DELTA_TAPS, dtype=dtype),
        rates=numbers(value_heads),
        dt_bias=numbers(value_heads),
        norm=numbers(size),
        norm_eps=EPSILON,
        states=numbers(slots, value_heads, size, size),
        writes=numbers(slots, pending, value_heads, size),
        keys=numbers(slots, pending, key_heads, size),
        decays=torch.rand(slots, pending, value_heads, device="cuda"),
        window=normal(slots, before + pending, channels, dtype=dtype),
    )
    starts, lengths, counts, padding = zip(*runs, strict=True)
    *firsts, rows = accumulate((sum(of_slot) for of_slot in zip(counts, padding, strict=True)), initial=0)
    places = zip(range(slots), starts, firsts, counts, strict=True)
    segments = ints(*(x for place in places for x in place)).view(-1, 4)
    stand, counters = ints(*lengths), torch.zeros(slots, key_heads, dtype=torch.int32, device="cuda")
    x = normal(rows, channels + value_heads * size, dtype=dtype)
    net(x, normal(rows, 2 * value_heads, dtype=dtype), segments, stand, counters, max(counts), keeps)
    kernels.advance_states(stand, segments, pending, keeps)


def products(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Products of few rows with weights [outputs, inputs]."""
    if torch.cuda.get_device_capability()[0] not in SKINNY_GPUS:
        return
    scales = torch.rand(outputs, device="cuda"), torch.rand(-(-outputs // 128), inputs // 128, device="cuda")
    for scale in (None, *scales):  # of rows, and of blocks
        fp8 = scale is not None
        if fp8 and inputs % 128:
            continue
        weight = normal(outputs, inputs, dtype=E4M3 if fp8 else dtype, by=0.05)
        bias, norm = normal(outputs, dtype=dtype), kernels.Norm(normal(inputs, dtype=dtype), EPSILON)
        for rows in (3, 16):
            x, residual = normal(rows, inputs, dtype=dtype), normal(rows, outputs, dtype=dtype)
            kernels.skinny_gemm(x, weight, scale)
            kernels.skinny_gemm(x, weight, scale, bias, norm=norm, residual=residual)
            if outputs % 32 == 0:
                kernels.skinny_gemm(x, weight, scale, bias, swiglu=True, norm=norm)
                kernels.skinny_gemm(x, weight, scale, swiglu=True, gelu=True)
            if dtype == torch.bfloat16 and not fp8:
                kernels.skinny_gemm(x, weight, norm=replace(norm, adds_one=True))


def wide_products(dtype: torch.dtype) -> None:
    """Products of tens of rows, of each division of the outputs on 132 multiprocessors."""
    if not is_hopper(CUDA):
        return
    if dtype == torch.bfloat16:
        halves, factors = kernels.quantize_rows(normal(200, 80, dtype=dtype))  # of a line that is not whole
        kernels.wide_gemm_fp8(halves, factors, normal(2880, 80, dtype=E4M3), torch.rand(2880, device="cuda"))
    for outputs in (2048, 2880, 4096, 5120, 6144, 7168, 12288, 14336, 16384, 19008, 24576):
        weight, bias = normal(outputs, 256, dtype=dtype, by=0.05), normal(outputs, dtype=dtype)
        for rows in (20, 50, 100):
            x, residual = normal(rows, 256, dtype=dtype), normal(rows, outputs, dtype=dtype)
            kernels.wide_gemm(x, weight, bias, residual=residual)
            kernels.wide_gemm(x, weight, bias, swiglu=True)
            kernels.wide_gemm(x, weight, swiglu=True, gelu=True)
            kernels.bulk_gemm(x, weight, bias)
            kernels.bulk_gemm(x, weight, gelu=True)
            if dtype == torch.bfloat16:
                fp8_products(x, outputs, bias, residual)


def fp8_products(x: Tensor, outputs: int, bias: Tensor, residual: Tensor) -> None:
    """Products of rows x and E4M3 weights, with a scale a row and a block."""
    weight = normal(outputs, x.shape[1], dtype=E4M3, by=0.05)
    scales = torch.rand(outputs, device="cuda"), torch.rand(-(-outputs // 128), x.shape[1] // 128, device="cuda")
    for scale, quantize in zip(scales, (kernels.quantize_rows, kernels.quantize_blocks), strict=True):
        rows, factors = quantize(x)
        kernels.wide_gemm_fp8(rows, factors, weight, scale, bias, residual=residual)
        kernels.wide_gemm_fp8(rows, factors, weight, scale, bias, swiglu=True)


def exact_products(dtype: torch.dtype, inputs: int) -> None:
    """Products of any number of rows, of each division of the outputs on 132 multiprocessors."""
    if not is_hopper(CUDA):
        return
    for outputs in (2048, 4096, 6144, 8464, 13312, 24576):
        weight, bias = normal(outputs, inputs, dtype=dtype, by=0.05), normal(outputs, dtype=dtype)
        norm = kernels.Norm(normal(inputs, dtype=dtype), EPSILON) if dtype == torch.bfloat16 else None
        for rows in (3, 12, 20, 50, 100, 130, 300):
            x, residual = normal(rows, inputs, dtype=dtype), normal(rows, outputs, dtype=dtype)
            kernels.exact_gemm(x, weight, bias, norm=norm, residual=residual)
            kernels.exact_gemm(x, weight, bias, swiglu=True)


def products_of_passes(dtype: torch.dtype) -> None:
    """Products of more outputs than each cluster takes in at once."""
    units = torch.cuda.get_device_properties(0).multi_processor_count // 2
    products(dtype, 16 * (7 * units + 2), 512)


def products_that_go_round(dtype: torch.dtype) -> None:
    """Products of so many outputs, or inputs, that each SM's ring of weights goes round."""
    units = torch.cuda.get_device_properties(0).multi_processor_count // 2
    products(dtype, 16 * (14 * units + 2), 512)
    products(dtype, 288, 12288)


#: Shares of a granule to several passes, and runs of inputs that do not fill all warps.
PRODUCTS = ((16, 128), (48, 192), (1056, 2944), (288, 3072))

#: Inputs of exact products: chains of one line and none, of lines apart, of lines that lie together.
EXACT_INPUTS = (320, 640, 1024)

#: Formats of experts.
EXPERTS = ("mxfp4", "nvfp4", "numbers", "fp8", "fp8 blocks")

#: By name. racecheck gets a process for each, and is slow with products: so theirs are several. What depends most on
#: barriers is first.
RACECHECK_GROUPS: dict[str, Callable[[torch.dtype], None]] = {
    "states": states,
    "states-many": states_of_many,
    **{f"states-{heads}-heads": partial(states_of_rows, value_heads=heads) for heads in (4, 16, 96)},
    **{f"experts-{x.replace(' ', '-')}": partial(experts, weight=x) for x in EXPERTS},
    "experts-int4": int4_experts,
    "attention-exact": exact_attention,
    **{
        group.__name__: group
        for group in (latents, attention, single_rows, choices, append, step, norms, sums, prompts)
    },
    "products-wide": wide_products,
    **{f"products-exact-{inputs}": partial(exact_products, inputs=inputs) for inputs in EXACT_INPUTS},
    **{f"products-{o}x{i}": partial(products, outputs=o, inputs=i) for o, i in PRODUCTS},
}
#: All; with the last two, the same kernels once more, racecheck of compute-sanitizer 2025.3 takes too long.
GROUPS = {
    **RACECHECK_GROUPS,
    "products-of-passes": products_of_passes,
    "products-that-go-round": products_that_go_round,
}


if __name__ == "__main__":
    main()
