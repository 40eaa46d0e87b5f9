"""The commands that the documentation gives: ours with their flags, make's targets, scripts, extras and settings."""

import re
import shlex

import click
import pytest

from tests.pages import DOCS, GUIDES, ROOT, calls, name_of, rows, spans
from trtllm_dflash.build.settings import BuildSettings
from trtllm_dflash.cli import main

#: Flags of other programs that the guides name.
OTHERS = {
    "--disable-hybrid-kv-cache-manager",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--http-restricted-api",
    "--grpc-restricted-protocol",
    "--trust-remote-code",
}


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command of ours that these words call, and the words that are left."""
    command: click.Command = main
    while isinstance(command, click.Group):
        if not words or words[0] not in command.commands:
            raise click.UsageError("there is no such command")
        command, words = command.commands[words[0]], words[1:]
    return command, words


def check_call(words: list[str]) -> None:
    """Parses a call, and calls nothing; what a page leaves out is not missed.

    Raises:
        click.UsageError: a flag, a value or an argument that the command does not take.
    """
    command, words = find_command(words)
    context = click.Context(command)
    values, rest, _ = command.make_parser(context).parse_args(words)
    if rest:
        raise click.UsageError(f"unexpected: {shlex.join(rest)}")
    for parameter in command.params:
        value = values.get(str(parameter.name))
        if isinstance(value, str | list | tuple):
            parameter.type_cast_value(context, value)


def flags_of(command: click.Command) -> set[str]:
    """A command's flags; a group's, and those of all that is in it."""
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return own.union(*map(flags_of, command.commands.values())) if isinstance(command, click.Group) else own


@pytest.mark.parametrize("call", ["build --nonsense 3", "build --tp two", "build --tp", "models extra", "compile"])
def test_a_wrong_call_is_seen(call: str) -> None:
    with pytest.raises(click.UsageError):
        check_call(shlex.split(call))


def test_our_commands_take_what_the_pages_give_them() -> None:
    ours = [(page, words) for page, words in calls("trtllm-dflash") if words[0] != "COMMAND"]
    assert len(ours) > 60
    for page, words in ours:
        try:
            check_call(words)
        except click.UsageError as error:
            pytest.fail(f"{name_of(page)}: trtllm-dflash {shlex.join(words)}: {error.message}")


def test_flags_in_the_text_are_there() -> None:
    """Where the text names a command, `build --plan`, they are its own; but for what follows --, another program's."""
    named = [(page, span) for page in GUIDES for span in spans(page) if re.search(r"(?<!\S)--[a-z]", span)]
    assert len(named) > 80
    for page, span in named:
        try:
            known = flags_of(find_command(span.removeprefix("trtllm-dflash ").split(" "))[0])
        except click.UsageError:
            known = flags_of(main) | OTHERS
        own = span.partition(" -- ")[0]
        assert set(re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", own)) <= known, f"{name_of(page)}: {span}"


def test_settings_that_the_pages_set_by_name_are_there() -> None:
    text = "\n".join(page.read_text() for page in GUIDES)
    named = {key.replace("-", "_") for key in re.findall(r"--set '?(\w[\w-]*)=", text)} - {"KEY"}
    assert named
    assert named <= BuildSettings.model_fields.keys()


def test_make_has_the_targets_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(name_of(page), word) for page, words in calls("make") for word in words if "=" not in word}
    texts = {(name_of(page), span) for page in GUIDES for span in spans(page)}
    named |= {(page, span.split(" ")[1]) for page, span in texts if re.match(r"make [a-z]", span)}
    assert len(named) > 10
    assert not [(page, target) for page, target in named if target not in targets]


def test_kernels_are_compiled_by_as_many_processes_as_there_are_cores() -> None:
    files = ["Makefile", "docker/Dockerfile", "plugins/CMakeLists.txt", "plugins/README.md"]
    builds = [line for file in files for line in (ROOT / file).read_text().splitlines() if "cmake --build" in line]
    assert len(builds) == 6
    assert not [build for build in builds if not re.search(r"--parallel \$+\(nproc\)$", build)]  # make: else no bound


def test_scripts_that_the_pages_call_have_their_flags() -> None:
    scripts = [(page, words) for page, words in calls("python") + calls("bash") if words[0] != "-m"]
    assert scripts
    for page, (script, *words) in scripts:
        text = (ROOT / script).read_text()
        own = words[: words.index("--")] if "--" in words else words
        for flag in {word.partition("=")[0] for word in own if word.startswith("--")}:
            assert f'"{flag}"' in text, f"{name_of(page)}: {script} {flag}"


def test_extras_that_the_pages_install_are_there() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.MULTILINE))
    text = "\n".join(page.read_text() for page in GUIDES)
    named = {extra for list_ in re.findall(r"pip install '[\w.-]*\[([\w,]+)\]'", text) for extra in list_.split(",")}
    assert named and named <= extras
    assert {row[0].strip("`") for row in rows(DOCS / "install.md") if row[0].startswith("`")} == extras
