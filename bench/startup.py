"""How long the command line takes to answer, beside the peers'."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.report import Report
from bench.tools import MGPU, PEERS, ROOT, environment, median_s, peer

LIMITS_S = {"--version": 0.05, "--help": 0.05, "status": 0.10, "plan": 0.20}


def main() -> None:
    """Prints medians in seconds, judged by our limits, and the peers' multiples of ours."""
    print("start-up, median of 9, bytecode compiled")
    env, report = environment(), Report()
    ours: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for argument, limit in LIMITS_S.items():
            cwd = ROOT if argument == "plan" else Path(folder)
            ours[argument] = median_s([str(MGPU), argument], cwd=cwd, env=env)
            report.at_most(f"mgpu {argument}", ours[argument], limit, " s")
        for name in PEERS:
            command = peer(name)
            for argument in ("--version", "--help") if command else ():
                seconds = median_s([str(command), argument], runs=5, cwd=Path(folder), env=env)
                print(f"  {name} {argument:<10} {seconds:.3f} s   {seconds / ours[argument]:.1f} x ours")
