"""The runtimes by the name that `--runtime` takes."""

from types import ModuleType

from trtllm_dflash.foreign import sglang, tensorrt_llm, vllm
from trtllm_dflash.foreign.launch import Launch
from trtllm_dflash.foreign.plan import LaunchSettings, Plan, plan

RUNTIMES: dict[str, ModuleType] = {"tensorrt-llm": tensorrt_llm, "vllm": vllm, "sglang": sglang}


def plan_for(settings: LaunchSettings) -> Plan:
    """The plan of these settings, with the memory that the runtime they name leaves to caches.

    Raises:
        SettingsError, CheckpointError: see `plan`.
    """
    return plan(settings, RUNTIMES[settings.runtime].available)


def launch_of(settings: LaunchSettings) -> Launch:
    """The command and files for these settings.

    Raises:
        SettingsError, CheckpointError: what the runtime would refuse, and why.
    """
    found: Launch = RUNTIMES[settings.runtime].launch(plan_for(settings))
    return found
