"""What calls `mgpu reconcile` in an AWS account: one stack for each backend, planned, brought up, taken down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mgpu import paths
from mgpu.context import Context
from mgpu.iac.engine.event_log import Change
from mgpu.iac.engine.project import program_apart
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import PASSES_PROJECT
from mgpu.providers.aws.bootstrap import resource
from mgpu.providers.aws.bootstrap.resource import Site
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.passes.manager import PassesManager
from mgpu.providers.aws.passes.resource import Passes
from mgpu.providers.aws.session import Account


class PassesStack:
    """The stack of this name; `asked`: what `infra/passes` reads, beside where it is (None: to take it down)."""

    def __init__(
        self, account: Account, region: str, context: Context, name: str, asked: Mapping[str, object] | None = None
    ) -> None:
        self.name = name
        self._manager = PassesManager(Site(account, region, context.timeouts.destroy_s))
        given = {"account": account.id(), "region": region, "name": name, **(asked or {})}
        if account.options.profile:
            given["profile"] = account.options.profile
        log_dir = paths.state_dir() / "passes" / name
        self._stack = Stack(
            program_apart("passes", Path.cwd()),
            name,
            log_dir / "none",
            log_dir=log_dir,
            emit=context.emit,
            timeouts=context.timeouts,
            config=None if asked is None else {f"{PASSES_PROJECT}:{key}": value for key, value in given.items()},
        )

    def preview(self) -> tuple[Change, ...]:
        """What `up` would change."""
        self._stack.init()
        return self._stack.preview()

    def forget(self) -> None:
        """Drops the stack if it holds nothing: one that was looked at, and not wanted."""
        if not self._stack.values():
            self._stack.remove()

    def up(self, secrets: Mapping[str, str], keep: frozenset[str]) -> None:
        """Makes it so. First these secrets go to Parameter Store; what is there beside them and `keep` goes last.

        Raises:
            ProviderError: AWS refused, or did not answer.
        """
        self._stack.init()  # from here on `down` knows what to look for
        with calling("writing the secrets of passes", self._manager.site.region):
            for variable, value in secrets.items():
                self._manager.keep_secret(self.name, variable, value)
        self._stack.up()
        with calling("deleting the secrets that passes need no more", self._manager.site.region):
            self._manager.forget_secrets(self.name, self._manager.secrets(self.name) - {*secrets} - keep)

    def down(self) -> None:
        """Takes it down, also what an interrupted `up` has left outside the stack.

        Raises:
            CleanupFailed: something is still there.
        """
        known = self._stack.exists()
        if known:
            self._stack.destroy()
        nothing = dict.fromkeys(("image", "command", "backend", "security_group"), "")
        resource.remove(self._manager, Passes(name=self.name, subnets=(), **nothing))
        if known:
            self._stack.remove()
