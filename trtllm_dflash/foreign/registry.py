"""The runtimes by the name that `--runtime` takes."""

from types import ModuleType

from trtllm_dflash.foreign import sglang, tensorrt_llm, vllm
from trtllm_dflash.foreign.launch import Launch
from trtllm_dflash.foreign.plan import LaunchSettings, Plan, plan

RUNTIMES: dict[str, ModuleType] = {"tensorrt-llm": tensorrt_llm, "vllm": vllm, "sglang": sglang}


def plan_for(settings: LaunchSettings) -> Plan:
    """Makes the plan of these settings, with the memory that their runtime leaves to caches.

    Raises:
        SettingsError, CheckpointError: see `plan`.
    """
    runtime = RUNTIMES[settings.runtime]
    return plan(settings, runtime.available, runtime.kept)


def launch_of(settings: LaunchSettings) -> Launch:
    """Makes the command and files of the runtime that the settings name.

    Raises:
        SettingsError, CheckpointError: what the runtime would refuse, and why.
    """
    found: Launch = RUNTIMES[settings.runtime].launch(plan_for(settings))
    return found
