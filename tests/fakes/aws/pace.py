"""How fast the fake's EC2 is: as slow as the real one, unless a test says otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Pace:
    """How slow EC2 is, in seconds of its own clock: what others have seen of it at its worst."""

    # from the grant until `running`; machines of metal take above 20 minutes to start: canonical/pycloudlib#192
    pending_s: float = 20.0
    metal_s: float = 1500.0
    # `shutting-down` of machines with GPUs, 5 to 8 minutes: aws/karpenter-provider-aws#7019,
    # bottlerocket-os/bottlerocket-test-system#337
    ending_s: float = 400.0
    # for which listings show what was: "up to five minutes", in
    # https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html; mostly it is seconds
    lag_s: float = 180.0
    # for which a machine that has ended still counts against its quota: seen, no figure of AWS's is known
    dead_count_s: float = 300.0
    # for which a pool that the spot market has taken a machine from has no other one: half an hour is a guess
    emptied_s: float = 1800.0
    # from running until the agent of Systems Manager has registered, and until sessions can begin
    agent_s: float = 60.0
    agent_flaps_s: float = 60.0


def realistic(scale: float) -> dict[str, float]:
    """EC2's pace on a clock that runs `scale` times faster than the wall's: the order of things is EC2's, and a test
    waits for seconds."""
    return {name: seconds / scale for name, seconds in asdict(Pace()).items()}


QUICK: dict[str, float] = dict.fromkeys(asdict(Pace()), 0.0)  # all at once, and all is seen
