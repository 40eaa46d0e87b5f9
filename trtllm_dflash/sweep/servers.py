"""Servers that a sweep measures: one, or one an arm; each Triton, or one with OpenAI's API."""

from collections.abc import Callable

from trtllm_dflash.errors import SettingsError
from trtllm_dflash.sweep.dataset import Dataset
from trtllm_dflash.sweep.load import Target
from trtllm_dflash.sweep.server_arms import ServerArms
from trtllm_dflash.sweep.settings import SweepSettings


def check_servers(settings: SweepSettings, dataset: Dataset, has_key_file: bool) -> None:
    """Check that the flags suit the servers' kind.

    Args:
        has_key_file: a file has the key of their APIs.

    Raises:
        SettingsError: a flag is not for servers of this kind, or one is missing.
    """
    urls = _urls(settings)
    if settings.tokenizer is not None and all(map(_is_openai, urls)):
        raise SettingsError("--tokenizer: an OpenAI API has its own; leave it out")
    if has_key_file and not any(map(_is_openai, urls)):
        raise SettingsError("--api-key-file: Triton has no keys; this goes with an http:// URL")
    talks = any(len(sample.turns) > 1 or sample.system for sample in dataset.samples)
    if talks and settings.tokenizer is None and not all(map(_is_openai, urls)):
        raise SettingsError(
            "--dataset: it has conversations, and Triton takes text: give --tokenizer DIR, for a template"
        )


def server_targets(settings: SweepSettings, key: str | None) -> Callable[[], Target]:
    """Prepare the sweep's target, to be made on its event loop.

    Args:
        key: of every OpenAI API.

    Raises:
        ImportError: a client's library is not installed.
    """
    open_server = _server_opener(settings, key)

    def make() -> Target:
        if not settings.servers:
            return open_server("served", settings.url or "", f"--url {settings.url}")
        return ServerArms(
            {arm: open_server(arm, url, f"--compare {arm}={url}") for arm, url in settings.servers.items()}
        )

    return make


def _urls(settings: SweepSettings) -> list[str]:
    return list(settings.servers.values()) or [settings.url or ""]


def _is_openai(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _server_opener(settings: SweepSettings, key: str | None) -> Callable[[str, str, str], Target]:
    """Make the function that opens a target from an arm, its URL and its name in errors."""
    urls = _urls(settings)
    if any(map(_is_openai, urls)):
        from trtllm_dflash.sweep.openai_target import OpenAITarget
    if not all(map(_is_openai, urls)):
        from trtllm_dflash.sweep.triton_target import TritonTarget, chat_text

        render, count = chat_text(settings.tokenizer)

    def open_server(arm: str, url: str, name: str) -> Target:
        model, metrics = settings.of_arm("model", arm), settings.of_arm("metrics_url", arm)
        if _is_openai(url):
            return OpenAITarget(url, model, key, metrics, name)
        return TritonTarget(url.removeprefix("grpc://"), model or "ensemble", render, count, metrics, name)

    return open_server
