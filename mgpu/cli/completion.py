"""`mgpu completion`: what a shell needs to complete commands, options, runs, stacks and GPUs."""

from __future__ import annotations

import click

from mgpu.console import Console

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MGPU_COMPLETE"  # by which click is asked


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion of SHELL, for its start-up file: `eval "$(mgpu completion bash)"` in ~/.bashrc,
    `eval "$(mgpu completion zsh)"` in ~/.zshrc, `mgpu completion fish | source` in ~/.config/fish/config.fish.
    """
    from click.shell_completion import get_completion_class

    from mgpu.cli import cli

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click knows no completion of {shell}")
    Console().text(found(cli, {}, "mgpu", VARIABLE).source())
