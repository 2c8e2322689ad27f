"""Sink `command`: a program of the user's for each message, which it gets as JSON on its standard input."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict

from mgpu_train.config import EnvName, Text
from pydantic import Field

from mgpu.sinks import telling
from mgpu.sinks.base import Heard
from mgpu.sinks.telling import Message, Telling
from mgpu.sinks.webhook import value_of
from mgpu.spec.sink import SinkEntry

_LASTS_S = 30.0  # then it is ended, and tried again later


class CommandOptions(telling.Options):
    """`sinks.command:` a program that is run for each message."""

    run: tuple[Text, ...] = Field(min_length=1, description="the program and its arguments; in the run file's folder")
    secrets: tuple[EnvName, ...] = Field(
        (), description="names of environment variables that it needs, which schedules pass on (default: none)"
    )


class CommandSink(Telling):
    """Runs the program; exit code 0 is a delivery. MGPU_EVENT, MGPU_RUN, MGPU_TITLE and MGPU_TEXT are set for it."""

    name = "command"

    def __init__(self, options: CommandOptions, heard: Heard) -> None:
        """Raises ValueError: a variable that the program needs is not set here."""
        super().__init__(options, heard)
        for variable in options.secrets:
            value_of(variable)
        self._argv, self._folder = options.run, heard.folder

    def tell(self, message: Message) -> None:
        """Raises OSError, subprocess.SubprocessError: it could not be run, failed, or took too long."""
        said = {"EVENT": message.event, "RUN": message.run_id, "TITLE": message.title, "TEXT": message.text}
        subprocess.run(
            [*self._argv],
            input=json.dumps({"version": 1, **asdict(message)}).encode(),
            env={**os.environ, **{f"MGPU_{name}": value for name, value in said.items()}},
            cwd=self._folder if self._folder.is_dir() else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LASTS_S,
            check=True,
        )


ENTRY = SinkEntry("mgpu.sinks.command:CommandSink", CommandOptions)
