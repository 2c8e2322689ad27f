"""Sinks `github` and `gitlab`: a run whose code is a commit's is a status of that commit: pending, success, failure.

POST /repos/OWNER/REPOSITORY/statuses/SHA     https://docs.github.com/rest/commits/statuses
POST /projects/PATH/statuses/SHA              https://docs.gitlab.com/api/commits
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

from mgpu_train.config import EnvName, Text
from pydantic import Field

from mgpu.errors import InputError, StackError
from mgpu.events import RunStateChanged
from mgpu.run.job.git_code import GitCode
from mgpu.run.record.record import find
from mgpu.sinks import telling
from mgpu.sinks.base import Heard, Sink
from mgpu.sinks.telling import Message, Telling
from mgpu.sinks.webhook import post, value_of
from mgpu.spec.block import Block
from mgpu.spec.sink import SinkEntry

_DESCRIPTION = 140  # characters; GitHub refuses more


class CommitStatusOptions(Block):
    """What both have."""

    token: EnvName = Field(description="name of the environment variable with a token that may write statuses")
    context: Text | None = Field(None, description="what the status is called (default: mgpu/<the schedule's name>)")
    api: Text | None = Field(None, description="https://..., where the API is (default: by the code's host)")


class GitHubOptions(CommitStatusOptions):
    """`sinks.github:` the run as a status of its code's commit, at GitHub."""


class GitLabOptions(CommitStatusOptions):
    """`sinks.gitlab:` the run as a status of its code's commit, at GitLab."""


class CommitStatus(Telling):
    """Says when the run begins, and how it has ended. What is late says nothing of a run that is over."""

    states: ClassVar[Mapping[str, str]]  # the host's word for a run that `begins`, and for each final state

    def __init__(self, options: CommitStatusOptions, heard: Heard) -> None:
        """Raises ValueError: the run's code is no commit of such a host. InputError, StackError: its record cannot be
        read."""
        super().__init__(telling.Options(events=("state", "ended")), heard)
        record = find(heard.run_id)
        if record is None:
            raise ValueError(f"the record of run {heard.run_id} was removed")
        if wrong := refusal(record.code):
            raise ValueError(wrong)
        self._variable, self._token, code = options.token, "", GitCode.of(record.code)
        self._context = options.context or f"mgpu/{record.schedule or record.name}"
        address = urlsplit(code.url)
        path = address.path.strip("/").removesuffix(".git")
        port = f":{address.port}" if address.port and address.scheme == "https" else ""
        api = (options.api or self.api(f"{address.hostname}{port}")).rstrip("/")
        self._url = f"{api}{self.place(path)}/statuses/{code.ref}"

    def prepare(self) -> None:
        """Raises ValueError: the variable is not set here, or no header can have its value."""
        self._token = value_of(self._variable)
        if not (self._token.isascii() and self._token.isprintable()):  # http.client's own error shows all of it
            raise ValueError(f"{self._variable} holds a line end, or something else that is in no token")

    @abstractmethod
    def api(self, host: str) -> str:
        """Where the API of that host is."""

    @abstractmethod
    def place(self, path: str) -> str:
        """Of a repository, there."""

    @abstractmethod
    def headers(self, token: str) -> dict[str, str]:
        """What says who asks."""

    def is_so(self, status: int, said: str) -> bool:
        """Whether this answer means that the commit has the status."""
        return 200 <= status < 300

    def run_state_changed(self, event: RunStateChanged) -> None:
        """Its begin is told, and no other state."""
        if event.state == "provisioning":
            super().run_state_changed(event)
        else:
            self.event(event)

    schedule_missed = Sink.schedule_missed  # a time without a run has no commit

    def tell(self, message: Message) -> None:
        """Raises OSError: no answer, or a refusal."""
        if message.event == "state" and _is_over(message.run_id):  # it could not be told in time
            return
        state = _state(message.data) if message.event == "ended" else "begins"
        text = "; ".join([message.run_id, *message.text.splitlines()]) if message.text else message.title
        fields = {"state": self.states[state], "context": self._context, "description": text[:_DESCRIPTION]}
        headers = {"Content-Type": "application/json", "User-Agent": "mgpu", **self.headers(self._token)}
        status, said = post(self._url, json.dumps(fields).encode(), headers)
        if not self.is_so(status, said):
            raise OSError(f"it answers {status}: {said[:200]}")


class GitHubSink(CommitStatus):
    """At github.com, or a GitHub of one's own."""

    name = "github"
    states: ClassVar[Mapping[str, str]] = {
        "begins": "pending", "succeeded": "success", "failed": "failure", "stopped": "error"
    }  # fmt: skip

    def api(self, host: str) -> str:
        """See CommitStatus."""
        return "https://api.github.com" if host == "github.com" else f"https://{host}/api/v3"

    def place(self, path: str) -> str:
        """See CommitStatus."""
        return f"/repos/{quote(path)}"

    def headers(self, token: str) -> dict[str, str]:
        """See CommitStatus."""
        version = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28"}
        return {"Authorization": f"Bearer {token}", **version}


class GitLabSink(CommitStatus):
    """At gitlab.com, or a GitLab of one's own."""

    name = "gitlab"
    states: ClassVar[Mapping[str, str]] = {
        "begins": "running", "succeeded": "success", "failed": "failed", "stopped": "canceled"
    }  # fmt: skip

    def api(self, host: str) -> str:
        """See CommitStatus."""
        return f"https://{host}/api/v4"

    def place(self, path: str) -> str:
        """See CommitStatus."""
        return f"/projects/{quote(path, safe='')}"

    def headers(self, token: str) -> dict[str, str]:
        """See CommitStatus."""
        return {"PRIVATE-TOKEN": token}

    def is_so(self, status: int, said: str) -> bool:
        """One that runs already cannot be set to run."""
        return super().is_so(status, said) or (status == 400 and "via :run from :running" in said)


def refusal(code: str) -> str:
    """Why a run with this code, git+URL@REF or empty, is no commit's; empty: it is one."""
    if not code:
        return "it tells of a commit, and the code of this run is a folder's"
    address = urlsplit(GitCode.of(code).url)
    if address.hostname is None or "/" not in address.path.strip("/"):
        return f"it tells of a commit of a repository at a host, and {code} is none"
    return ""


def _is_over(run_id: str) -> bool:
    try:
        record = find(run_id)
    except (InputError, StackError):  # it cannot be read now: what was to be told is told
        return False
    return record is None or record.state.final


def _state(ended: Mapping[str, Any]) -> str:
    return "failed" if ended["state"] == "succeeded" and ended["exit_code"] else str(ended["state"])


GITHUB = SinkEntry("mgpu.sinks.commit_status:GitHubSink", GitHubOptions, refusal)
GITLAB = SinkEntry("mgpu.sinks.commit_status:GitLabSink", GitLabOptions, refusal)
