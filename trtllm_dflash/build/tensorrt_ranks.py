"""Compiles every rank of an engine, one after another or several at a time, each in a bound of host memory."""

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path

from trtllm_dflash.build.tensorrt_compiler import CompileSettings, compile_rank
from trtllm_dflash.build.weights import read_rank_weights
from trtllm_dflash.checkpoint.pair import Pair
from trtllm_dflash.cost.gpus import GB
from trtllm_dflash.cost.memory import weight_bytes
from trtllm_dflash.engine.config import EngineConfig, PlanSummary, Progress
from trtllm_dflash.engine.directory import PLUGIN_FILE, plan_file
from trtllm_dflash.errors import EngineError, SettingsError
from trtllm_dflash.ops.tensorrt_plugin import load_plugin
from trtllm_dflash.session.weights import complete_weights
from trtllm_dflash.signals import is_heard

TIMING_CACHE = "timing.cache"

#: Host memory that compiling a rank takes at most, in sizes of its weights; 3.1 to 3.7 were measured.
MEMORY_FACTOR = 4
#: And what a process with torch and TensorRT takes before it has any weights.
MEMORY_BASE = 2 * GB


def compile_ranks(
    pair: Pair, config: EngineConfig, folder: Path, cache_folder: Path, workers: int, progress: Progress
) -> tuple[PlanSummary, ...]:
    """Writes every rank's plan and build log into `folder`; the timing cache is kept in `cache_folder`.

    With `config.plugin`, the plugin's library already lies in `folder`.

    Raises:
        SettingsError: this host has not the memory for so many workers.
        EngineError: TensorRT refused a rank's network.
    """
    workers = min(workers, config.tp)
    check_host_memory(config, workers)
    jobs = [(pair, config, rank, folder, cache_folder / TIMING_CACHE) for rank in range(config.tp)]
    if workers == 1:
        return tuple(_compile(*job, progress) for job in jobs)
    done = 0
    progress("ranks", done, config.tp)
    # New processes, not forked ones: TensorRT's threads would not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_silently_on_interrupt) as pool:
        # They start with SIGINT blocked, until they have their own way to end; the tracker's start would unblock it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(_compile, *job) for job in jobs]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            for future in as_completed(futures):
                future.result()
                done += 1
                progress("ranks", done, config.tp)
        except BrokenProcessPool:
            raise EngineError("a worker was killed, probably for want of memory: use fewer --workers") from None
        except BaseException:
            for worker in active_children():
                worker.terminate()  # one that compiles would go on to its end
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return tuple(future.result() for future in futures)


def _end_silently_on_interrupt() -> None:
    if is_heard(signal.SIGINT):
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def host_memory(config: EngineConfig) -> int:
    """Bounds the bytes of host memory that compiling one rank takes."""
    return MEMORY_BASE + MEMORY_FACTOR * weight_bytes(config)


def check_host_memory(config: EngineConfig, workers: int) -> None:
    """Refuses more workers than this host has memory for, before anything is compiled.

    Raises:
        SettingsError: names --workers, and how many would do.
    """
    each, room = host_memory(config), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if workers * each > room:
        fit = room // each
        advice = f"use --workers {fit}" if fit else "use more ranks (--tp) or a host with more memory"
        raise SettingsError(
            f"--workers {workers}: compiling a rank takes up to {each / GB:.0f} GB of this host's "
            f"{room / GB:.0f} GB: {advice}"
        )


def _compile(
    pair: Pair, config: EngineConfig, rank: int, folder: Path, cache: Path, progress: Progress = lambda *_: None
) -> PlanSummary:
    begin = time.perf_counter()
    if config.plugin is not None:
        load_plugin(folder / PLUGIN_FILE)
    weights = complete_weights(read_rank_weights(pair, config.tp, rank, config.dtype), config, rank)
    settings = CompileSettings(
        gpu=config.gpu,
        optimization_level=config.optimization_level or 0,
        workspace=config.workspace,
        timing_cache=cache,
        log=folder / f"build-rank{rank}.log",
    )
    plan = compile_rank(config, weights, rank, settings, progress)
    (folder / plan_file(rank)).write_bytes(plan.data)
    seconds = round(time.perf_counter() - begin, 3)
    transcoded = plan.transcoded if plan.transcoded.blocks else None
    return PlanSummary(
        layers=plan.layers, weights=plan.weights, bytes=plan.data.nbytes, seconds=seconds, transcoded=transcoded
    )
