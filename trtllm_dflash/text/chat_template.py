"""Chat templates as checkpoints have them: whether they are templates at all."""

from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from trtllm_dflash.errors import CheckpointError


class _Generation(Extension):
    """The tag by which transformers marks what an assistant says."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # as the library uses it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses what it encloses."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def check_templates(said: object, file: Path) -> None:
    """Checks a tokenizer_config.json's `chat_template`: a template, or a list of them with their names.

    Raises:
        CheckpointError: one cannot be parsed, or none is the default.
    """
    if isinstance(said, str):
        check_syntax(said, file)
    if not isinstance(said, list):
        return
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in said}
    except (KeyError, TypeError):
        raise CheckpointError(f"{file}: chat_template is not a list of names and templates") from None
    for template in named.values():
        check_syntax(template, file)
    if named and "default" not in named and not (file.parent / "chat_template.jinja").is_file():  # which goes before
        raise CheckpointError(f"{file}: none of its chat templates is named default; there are {', '.join(named)}")


def check_syntax(template: str, file: Path) -> None:
    """Checks that a chat template can be parsed, as transformers does it at the first conversation.

    Args:
        file: that it is of, for the error.

    Raises:
        CheckpointError: it cannot.
    """
    try:
        Environment(autoescape=False, extensions=[_Generation, "jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        said = (error.message or "").rstrip(".")
        raise CheckpointError(f"{file}: the chat template's line {error.lineno}: {said}; download it again") from None
