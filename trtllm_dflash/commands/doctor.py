"""`doctor`: lists what this machine has, and what it lacks."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine has, what each absence costs, and how to get it."""
    from trtllm_dflash.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding.__dict__ for finding in findings], indent=2))
        return
    for finding in findings:
        mark = "ok     " if finding.present else "missing"
        click.echo(f"{mark}  {finding.name:<16} {finding.detail}")
        if not finding.present:
            click.echo(f"{'':<26} costs: {finding.cost}\n{'':<26} get it: {finding.remedy}")
