"""What commands print."""

from rich.table import Table

from trtllm_dflash.commands.terminal import show


def test_texts_are_printed_as_they_are_whatever_stands_in_brackets(capsys):
    """A server's error may quote a chat template."""
    table = Table("why")
    table.add_row("unexpected [/INST] in [bold]prompt[/bold] :smile:")
    show(table, "[/INST] [x]")
    said = capsys.readouterr().out
    assert "[/INST] in [bold]prompt[/bold] :smile:" in said and "[/INST] [x]" in said
