"""Systems Manager's sessions, which moto lacks: which machines have registered, and streams to their SSH servers.

A machine's agent registers a while after it runs, if its role may and its network leads out; sessions begin a while
after that. A stream goes through a relay here, for whoever knows its token, as `plugin.py` does. Whoever leaves it
without a word leaves it open, as at AWS: it ends when the machine's SSH server hangs up, or the machine is gone.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.iam.models import iam_backends
from moto.ssm.exceptions import SSMException
from moto.ssm.responses import SimpleSystemManagerResponse

from fakes.aws import base, faults, permissions
from fakes.aws.cloud import Cloud
from fakes.aws.faults import ACCOUNT
from fakes.aws.life import Life
from fakes.aws.patching import add

DOCUMENT = "AWS-StartSSHSession"
PAGE = 10
DIAL_S = 10.0


@dataclass
class Session:
    """One that was begun; the rest is what its program has told of itself when it joined."""

    id: str
    instance: str
    token: str = field(repr=False)
    user: str = ""
    joined: dict[str, str] = field(default_factory=dict)
    open: bool = False


class Sessions:
    """All of them, and the relay for their streams, which listens at `host`."""

    def __init__(self, cloud: Cloud, host: str) -> None:
        self.cloud, self.by_id = cloud, dict[str, Session]()
        self.servers: dict[str, tuple[str, int]] = {}  # of machines that have none of their own
        self._relay = socket.create_server(("0.0.0.0", 0), backlog=512)
        self.url = f"ws://{host}:{self._relay.getsockname()[1]}"
        threading.Thread(target=self._serve, name="sessions", daemon=True).start()

    def clear(self) -> None:
        """As new."""
        self.by_id.clear()
        self.servers.clear()

    def shown(self) -> list[dict[str, Any]]:
        """Oldest first."""
        return [{**asdict(each), "token": ""} for each in self.by_id.values()]

    def registered(self, life: Life, late_s: float = 0.0) -> bool:
        """Whether its agent has registered, that long ago."""
        since = next((at for at, state in life.history if state.name == "running"), None)
        due = since is not None and time.time() >= since + self.cloud.rules.agent_s + late_s
        return due and life.state == "running" and _may_register(life.instance) and _leads_out(life.instance)

    def begin(self, instance: str, user: str) -> Session:
        """A session that somebody may join."""
        life = self.cloud.lives.by_id.get(instance)
        if life is None or not self.registered(life, self.cloud.rules.agent_flaps_s):
            raise SSMException("TargetNotConnected", f"{instance} is not connected.")
        made = Session(f"{user}-{secrets.token_hex(8)}", instance, secrets.token_urlsafe(24), user)
        self.by_id[made.id] = made
        return made

    # --- streams

    def _serve(self) -> None:
        while True:
            client, _ = self._relay.accept()
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        try:
            told = json.loads(_line(client))
            session = self.by_id.get(told.pop("id"))
            refusal = self._refusal(session, told)
            server = None if refusal or session is None else self._dial(session)
            if session is None or server is None:
                client.sendall((refusal or "Connection to destination port failed, check SSH configurations.").encode())
                client.close()
                return
            client.sendall(b"\n")
        except (OSError, ValueError) as error:
            print(f"session: {error!r}", file=sys.stderr, flush=True)  # noqa: T201
            client.close()
            return
        session.joined, session.open = told, True
        threading.Thread(target=_pump, args=(client, server, lambda: None), daemon=True).start()
        _pump(server, client, client.close)
        server.close()
        session.open = False

    def _refusal(self, session: Session | None, told: dict[str, str]) -> str:
        """Why the program may not join; its token is good for once."""
        if session is None or told.pop("token") != session.token or session.joined:
            return "Unexpected response from the service: the token is not valid"
        with self.cloud.lock:
            who = permissions.caller(told["key"])
            arn = f"arn:aws:ssm:{told['region']}:{ACCOUNT}:session/{session.id}"
            if self.cloud.enforced and who and not permissions.allowed(who, "ssmmessages:OpenDataChannel", arn, {}):
                return faults.denial("ssmmessages", "OpenDataChannel")
        return ""

    def _dial(self, session: Session) -> socket.socket | None:
        life = self.cloud.lives.by_id[session.instance]
        try:
            server = self.servers.get(session.instance, (life.instance.private_ip_address, 22))
            return socket.create_connection(server, DIAL_S)
        except OSError:
            return None


def install(cloud: Cloud, host: str) -> Sessions:
    """From now on moto's Systems Manager has these calls."""
    sessions = Sessions(cloud, host)

    def start_session(self: Any) -> ActionResult:
        target, document = self._get_param("Target"), self._get_param("DocumentName")
        if document != DOCUMENT or self._get_param("Parameters") != {"portNumber": ["22"]}:
            raise SSMException("InvalidDocument", f"the fake AWS knows {DOCUMENT} to port 22 alone")
        who = permissions.caller(self.access_key)
        if cloud.enforced and who and not _may_start(who, target, self.region):
            raise SSMException("AccessDeniedException", faults.denial("ssm", "StartSession"))
        made = sessions.begin(target, who.name if who else "root")
        url = f"{sessions.url}/v1/data-channel/{made.id}"
        return ActionResult({"SessionId": made.id, "TokenValue": made.token, "StreamUrl": url})

    def describe_instance_information(self: Any) -> ActionResult:
        filters = {each["Key"]: each["Values"] for each in self._get_param("Filters") or []}
        wanted, start = filters.get("InstanceIds"), int(self._get_param("NextToken") or 0)
        page = min(50, self._get_param("MaxResults") or PAGE)
        lives = [each for each in cloud.lives.by_id.values() if each.pool.region == self.region]
        found = [each.instance.id for each in lives if sessions.registered(each)]
        found = [each for each in found if wanted is None or each in wanted]
        rows = [{"InstanceId": each, "PingStatus": "Online"} for each in found[start : start + page]]
        more = {"NextToken": str(start + page)} if len(found) > start + page else {}
        return ActionResult({"InstanceInformationList": rows, **more})

    add(SimpleSystemManagerResponse, "start_session", start_session)
    add(SimpleSystemManagerResponse, "describe_instance_information", describe_instance_information)
    return sessions


def _may_start(who: Any, target: str, region: str) -> bool:
    """Judged twice, as AWS does: for the machine, with its tags, and for the document."""
    tags = ec2_backends[ACCOUNT][region].describe_tags(filters={"resource-id": [target]})
    facts = {f"ssm:resourceTag/{tag['key']}": tag["value"] for tag in tags}
    things = (f"ec2:{region}:{ACCOUNT}:instance/{target}", f"ssm:{region}::document/{DOCUMENT}")
    return all(permissions.allowed(who, "ssm:StartSession", f"arn:aws:{thing}", facts) for thing in things)


def _may_register(instance: Any) -> bool:
    arn = (instance.iam_instance_profile or {}).get("Arn")
    profiles = iam_backends[ACCOUNT]["aws"].instance_profiles.values()
    roles = [role for profile in profiles if profile.arn == arn for role in profile.roles]
    return any(all(permissions.allowed(role, action, "*", {}) for action in base.AGENT) for role in roles)


def _leads_out(instance: Any) -> bool:
    """By a public address, by a route that needs none, or by an endpoint of its network's."""
    if instance.public_ip_address:
        return True
    ec2, vpc = instance.ec2_backend, instance.vpc_id
    here = [table for table in ec2.route_tables.values() if table.vpc_id == vpc]
    own = [table for table in here if any(each.get("SubnetId") == instance.subnet_id for each in table.associations)]
    tables = own or [table for table in here if table.main_association_id]
    routes = [route for table in tables for route in table.routes]
    if any(route.destination_cidr_block == "0.0.0.0/0" and _needs_no_address(route) for route in routes):
        return True
    services = {each.service_name.rpartition(".")[2] for each in ec2.vpc_end_points.values() if each.vpc_id == vpc}
    return {"ssm", "ssmmessages"} <= services


def _needs_no_address(route: Any) -> bool:
    return any((route.nat_gateway, route.transit_gateway, route.instance, route.interface))


def _line(client: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := client.recv(1)):
            raise ValueError("it hung up")
        line += byte
    return line


def _pump(source: socket.socket, sink: socket.socket, at_end: Callable[[], None]) -> None:
    try:
        while data := source.recv(65_536):
            sink.sendall(data)
    except OSError:
        pass  # one of the two is gone
    at_end()
