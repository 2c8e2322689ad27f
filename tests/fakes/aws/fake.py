"""The fake AWS as a test holds it: a process that lives as long as this object's pipe to it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from forks import Forked, Forks

from fakes.aws import base, control, ecr, world
from fakes.aws.pace import QUICK

READY_S = 60.0
SCALE, SCALE_ALONE = 300.0, 3000.0  # of its clock: with machines behind it, and without
PROGRAMS = Path(__file__).with_name("programs")  # AWS's own, for users' machines: a folder for PATH
_PROCESS = "fakes.aws.process"
_FORKS = Forks(_PROCESS)  # moto alone takes 2 s of CPU
HOME_REGION = "us-east-1"
# credentials of moto's root user; a user's own configuration is shielded off
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAFAKEFAKEFAKEFAKE", "AWS_SECRET_ACCESS_KEY": "fake"}
SHIELD = {
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
# what has to be absent, since an empty value means something
FOREIGN = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ROLE_ARN")


@dataclass(frozen=True)
class Row:
    """One line of the bill; times in UNIX seconds."""

    id: str
    instance_type: str
    market: str
    region: str
    zone: str
    owner: str | None
    usd_per_hour: float
    launched_at: float
    ended_at: float | None


@dataclass(frozen=True)
class Called:
    """One request that came; `at` in UNIX seconds, `parameters` as boto3 takes them."""

    at: float
    service: str
    action: str
    region: str
    parameters: dict[str, Any]


class FakeAws:
    """A running fake; `with FakeAws.start(folder) as aws:`."""

    def __init__(
        self, folder: Path, process: Forked, life: BinaryIO, port: int, machines: bool, engines: bool = False
    ) -> None:
        self.folder, self._process, self._life, self._port = folder, process, life, port
        self._lock, self._session, self._clients = threading.Lock(), None, dict[tuple[Any, ...], Any]()
        # the words before a command that run it where the machines are
        self.prefix: list[str] = world.prefix(process.pid) if machines else []
        self._engines = engines
        if engines:
            self.prefix += ecr.prefix(folder)
        self.endpoint = f"http://{world.GATEWAY if machines else '127.0.0.1'}:{port}"

    @classmethod
    def start(
        cls,
        folder: Path,
        machines: bool = False,
        *,
        all_regions: bool = False,
        engines: bool = False,
        scale: float | None = None,
    ) -> FakeAws:
        """Starts one; what it complains about goes to `folder`/fake-aws.log. `all_regions`: else a few are enabled.
        `scale`: how much faster than the wall's its clock is (default: 300, and 3000 where nothing boots). `engines`:
        the machine images bring Docker, as AWS's do, and ECR has a registry."""
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {"--machines": machines, "--all-regions": all_regions, "--engines": engines}
        faster = scale or (SCALE if machines else SCALE_ALONE)
        arguments = [str(folder), str(faster), *(flag for flag, on in wanted.items() if on)]
        (stdin, ours), (theirs, stdout) = os.pipe(), os.pipe()
        life = os.fdopen(ours, "wb")  # the fake ends when it is closed, by our end too
        with (folder / "fake-aws.log").open("ab") as log:
            process = _FORKS.start(
                _PROCESS, arguments, _own_environment(), stdin=stdin, stdout=stdout, stderr=log.fileno()
            )
        os.close(stdin)
        os.close(stdout)
        try:
            with os.fdopen(theirs, "rb") as answer:
                return cls(folder, process, life, _ready(answer, folder)["port"], machines, engines)
        except BaseException:
            _end(process, life)
            raise

    def __enter__(self) -> FakeAws:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it and all that it made."""
        _end(self._process, self._life)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def env(self) -> dict[str, str]:
        """What to lay over os.environ, less the names of `FOREIGN`, so that AWS means this fake alone."""
        region = {"AWS_REGION": HOME_REGION, "AWS_DEFAULT_REGION": HOME_REGION}  # boto3 reads the second alone
        trust = {"SSL_CERT_FILE": str(ecr.ca_file(self.folder))} if self._engines else {}
        here = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "MGPU_EMULATED_GPUS": "1",
        }  # its machines only say that they have GPUs
        return {**CREDENTIALS, **SHIELD, **region, **trust, **here}

    @property
    def options(self) -> dict[str, str]:
        """For provider `aws`."""
        return {"endpoint_url": self.endpoint}

    def client(self, service: str, region: str = HOME_REGION, **credentials: str) -> Any:
        """A boto3 client of this process; `credentials` as boto3.client takes them."""
        key = (service, region, *sorted(credentials.items()))
        with self._lock:  # botocore makes clients in one thread at a time
            if key not in self._clients:
                self._clients[key] = self._client(service, region, credentials)
            return self._clients[key]

    def _client(self, service: str, region: str, credentials: dict[str, str]) -> Any:
        from botocore.config import Config
        from botocore.session import Session

        self._session = self._session or Session(session_vars={"profile": (None, None, None, None)})
        given: dict[str, Any] = {
            "aws_access_key_id": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            **credentials,
        }
        config = Config(retries={"total_max_attempts": 1}, proxies={})
        endpoint = f"http://127.0.0.1:{self._port}"
        return self._session.create_client(service, region, endpoint_url=endpoint, config=config, **given)

    def ask(self, verb: str, **arguments: Any) -> Any:
        """A verb of the control API; `control.Refused` if it cannot be done."""
        return control.ask(self.folder, verb, **arguments)

    def reset(self) -> None:
        """All of moto, the rules, the calls and the bill as new; machines end first."""
        self.ask("reset")

    def calls(self, action: str | None = None) -> list[Called]:
        """The requests that came since the last reset, oldest first."""
        return [Called(**each) for each in self.ask("calls") if action in (None, each["action"])]

    def bill(self) -> list[Row]:
        """What AWS would bill, ended or not."""
        return [Row(**each) for each in self.ask("bill")]

    def alive(self) -> list[str]:
        """The ids of all that is billed now."""
        return [row.id for row in self.bill() if row.ended_at is None]

    def image(self, region: str = HOME_REGION) -> str:
        """The id of a machine image that can be launched there; EC2 refuses unknown ones."""
        name = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
        return self.client("ssm", region).get_parameter(Name=name)["Parameter"]["Value"]

    def deprecate(self, image_id: str) -> None:
        """Has the owner of a machine image deprecate it."""
        self.ask("deprecate", image_id=image_id)

    def base(self, region: str = HOME_REGION) -> dict[str, str]:
        """Makes what machines stand on in a region, by plain boto3; what it made, by name."""
        return base.make(self.client, region)

    def endpoints(self, region: str = HOME_REGION) -> None:
        """Gives the default VPC endpoints of Systems Manager: without, only public addresses lead out of it."""
        base.endpoints(self.client, region)

    def sessions(self) -> list[dict[str, Any]]:
        """The sessions that were begun, oldest first: `instance`, `open`, and what whoever joined told of itself."""
        return self.ask("sessions")

    def enforce(self, on: bool = True) -> None:
        """Asks policies about every caller but `client`'s own root user; moto judges actions and resources alone."""
        self.ask("enforce", on=on)

    def organization(self, *statements: dict[str, Any]) -> None:
        """The policy of the account's organization, statements that deny, for every caller."""
        self.ask("organization", statements=statements)

    def failed_schedules(self) -> list[str]:
        """What EventBridge Scheduler tried in vain."""
        return self.ask("failed")

    # what goes wrong with requests

    def fault(self, action: str, kind: str = "error", **more: Any) -> None:
        """A rule in full; `kind` is error, lose or hang, the rest is faults.Fault's."""
        self.ask("fault", action=action, kind=kind, **more)

    def errors(self, action: str, code: str, n: int | None = None, **more: Any) -> None:
        """Has calls of an action fail: the next `n`, or all. `more`: see `Fault`."""
        self.fault(action, code=code, left=n, **more)

    def throttle(self, share: float = 1.0, action: str = "*", n: int | None = None) -> None:
        """Has that share of calls refused as too many."""
        self.errors(action, "Throttling", n, share=share)

    def unavailable(self, action: str = "*", n: int | None = None, after: bool = False) -> None:
        """Answers 503; `after`: although the call was carried out."""
        self.errors(action, "Unavailable", n, after=after)

    def deny(self, action: str) -> None:
        """Takes the permission for an action away."""
        self.errors(action, "Denied")

    def expire(self) -> None:
        """Has the credentials expire."""
        self.errors("*", "Expired")

    def lose_answers(self, action: str, n: int = 1, skip: int = 0) -> None:
        """Carries the next `n` calls out and hangs up; `skip` calls go well before."""
        self.fault(action, "lose", left=n, skip=skip)

    def hang(self, action: str, seconds: float, n: int | None = None) -> None:
        """Has calls wait that long before anything is done."""
        self.fault(action, "hang", seconds=seconds, left=n)

    def calm(self) -> None:
        """Ends all faults of requests."""
        self.ask("calm")

    # what EC2 has, and its pace

    def capacity(
        self,
        count: int | None = 0,
        instance_type: str = "*",
        zone: str = "*",
        market: str = "*",
        code: str = "InsufficientInstanceCapacity",
    ) -> None:
        """Lets at most `count` machines run in each of the pools named (None: any number); the newest word holds."""
        self.ask("capacity", count=count, code=code, instance_type=instance_type, zone=zone, market=market)

    def price(self, usd_per_hour: float, instance_type: str = "*", zone: str = "*", market: str = "*") -> None:
        """Fixes the price of a machine in the pools named."""
        self.ask("price", usd_per_hour=usd_per_hour, instance_type=instance_type, zone=zone, market=market)

    def quota(self, code: str, vcpus: float) -> None:
        """Sets an EC2 quota (`L-...`) in every region."""
        self.ask("quota", code=code, vcpus=vcpus)

    def reserve(
        self,
        instance_type: str,
        count: int,
        zone: str,
        *,
        block: bool = False,
        begins_s: float = 0.0,
        hours: float | None = None,
        is_open: bool = False,
        group: str = "",
        **more: Any,
    ) -> str:
        """Makes a capacity reservation, or with `block` a Capacity Block that was bought; its id. `hours`: None, it has
        no end. `more`: what else EC2 shows of it, or otherwise."""
        wanted = {"instance_type": instance_type, "count": count, "zone": zone, "block": block, "open": is_open}
        return self.ask("reserve", begins_s=begins_s, hours=hours, group=group, more=more, **wanted)

    def sell(
        self,
        instance_type: str,
        count: int,
        zone: str,
        usd: float,
        *,
        hours: float = 24,
        begins_s: float = 3600.0,
        expires_s: float = 3600.0,
        left: int = 1,
    ) -> str:
        """Puts a Capacity Block on sale, `left` times, until it expires; its id."""
        times = {"hours": hours, "begins_s": begins_s, "expires_s": expires_s, "left": left, "usd": usd}
        return self.ask("sell", instance_type=instance_type, count=count, zone=zone, **times)

    def fewer(self, machines: int = 1) -> None:
        """Has the next fleet come with so many machines less than it promised."""
        self.ask("set", name="fewer", value=machines)

    def stubborn(self, times: int = 1) -> None:
        """Has the next TerminateInstances say yes and do nothing."""
        self.ask("set", name="stubborn", value=times)

    def lag(self, seconds: float) -> None:
        """Has DescribeInstances show what was that long ago."""
        self.ask("set", name="lag_s", value=seconds)

    def quick(self, **seconds: float) -> None:
        """Has EC2 do all at once, and show it at once, but for what is named (`pace`'s words): for tests of single
        calls, which have to say so."""
        self.pace(**{**QUICK, **seconds})

    def pages(self, size: int) -> None:
        """Has DescribeInstances give at most so many machines a page."""
        self.ask("set", name="page", value=size)

    def pace(self, **seconds: float) -> None:
        """Sets what `pace.Pace` has, and `forget_s` (how long terminated machines are shown), in seconds of the wall's
        clock."""
        for name, value in seconds.items():
            self.ask("set", name=name, value=value)

    def age(self, seconds: float) -> None:
        """Makes all that there is that much older, and lets happen what is due by then."""
        self.ask("age", seconds=seconds)

    # what happens to machines

    def kill(self, instance_id: str) -> None:
        """The spot market takes a machine without a notice."""
        self.ask("kill", instance_id=instance_id)

    def interrupt(self, instance_id: str, seconds: float = 120.0) -> None:
        """Gives a machine its interruption notice, and takes it after that time."""
        self.ask("interrupt", instance_id=instance_id, seconds=seconds)

    def rebalance(self, instance_id: str) -> None:
        """Gives a machine a rebalance recommendation."""
        self.ask("rebalance", instance_id=instance_id)

    def stop(self, instance_id: str) -> None:
        """A machine switches itself off, as its own clock would; its shutdown behaviour says what that means."""
        self.ask("stop", instance_id=instance_id)

    def server(self, instance_id: str, port: int, host: str = "127.0.0.1") -> None:
        """Where sessions with a machine lead to, which has no SSH server of its own."""
        self.ask("server", instance_id=instance_id, host=host, port=port)

    # what only a machine can have (machines=True)

    def cut(self, instance_id: str) -> None:
        """A machine's wire is cut, silently; it runs on."""
        self.ask("trouble", instance_id=instance_id, what="wire", value=False)

    def mend(self, instance_id: str) -> None:
        """A cut wire is whole again."""
        self.ask("trouble", instance_id=instance_id, what="wire", value=True)

    def freeze(self, instance_id: str) -> None:
        """A machine's kernel hangs: it runs on, and nothing in it does, its own clocks neither."""
        self.ask("trouble", instance_id=instance_id, what="hang", value=True)

    def metadata(self, instance_id: str, fault: str | None) -> None:
        """A machine's metadata service fails: `hang`, `500`, `refused`, `malformed`; None: it works again."""
        self.ask("trouble", instance_id=instance_id, what="metadata", value=fault)


def _own_environment() -> dict[str, str]:
    """Of the fake's process: moto uses botocore, and shall not find the user's configuration either."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, **SHIELD, "PYTHONPATH": path}


def _ready(answer: BinaryIO, folder: Path) -> dict[str, Any]:
    line = answer.readline() if select.select([answer], [], [], READY_S)[0] else b""
    if not line:
        raise RuntimeError(f"the fake AWS did not start: {(folder / 'fake-aws.log').read_text()[-2000:]}")
    return json.loads(line)


def _end(process: Forked, life: BinaryIO) -> None:
    life.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
