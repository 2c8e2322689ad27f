"""Sink `apprise`: Slack, e-mail, Telegram, Teams and all else that the library Apprise knows an address of."""

from __future__ import annotations

from mgpu_train.config import EnvName
from pydantic import Field

from mgpu.sinks import telling
from mgpu.sinks.base import Heard
from mgpu.sinks.telling import Message, Telling
from mgpu.sinks.webhook import value_of
from mgpu.spec.sink import SinkEntry


class AppriseOptions(telling.Options):
    """`sinks.apprise:` Slack, e-mail and others, by the addresses of the library Apprise."""

    urls: tuple[EnvName, ...] = Field(
        min_length=1,
        description="names of environment variables, each with one address: a Slack webhook's, mailto://..., "
        "https://github.com/caronc/apprise/wiki has them all",
    )


class AppriseSink(Telling):
    """Tells every address; a delivery is one that all of them have taken."""

    name = "apprise"

    def __init__(self, options: AppriseOptions, heard: Heard) -> None:
        super().__init__(options, heard)
        self._urls = options.urls

    def prepare(self) -> None:
        """Raises ValueError: a variable is not set here, or holds no address that Apprise knows."""
        import apprise

        self._each = {variable: apprise.Apprise() for variable in self._urls}
        for variable, one in self._each.items():
            if not one.add(value_of(variable)):
                raise ValueError(f"{variable} holds no address that Apprise knows")

    def tell(self, message: Message) -> None:
        """Raises OSError: one has not taken it; those that have are left out the next time."""
        taken, failed = self._outbox.taken(message.id) if len(self._each) > 1 else None, list[str]()
        for variable, one in self._each.items():
            if variable in (taken or ()):
                continue
            if not one.notify(title=message.title, body=message.text or message.title):
                failed.append(variable)
            elif taken is not None:  # at once: the next one may hang
                self._outbox.note_taken(message.id, variable)
        if failed:
            raise OSError(f"not delivered: {', '.join(failed)}")


ENTRY = SinkEntry("mgpu.sinks.apprise:AppriseSink", AppriseOptions)
