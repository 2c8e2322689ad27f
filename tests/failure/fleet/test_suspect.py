"""A GPU fails, and says so by the program that it ruins: this machine is replaced, and the others stay."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status.status import Fault

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.drawn("faults x nodes of a fleet")
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_whose_gpu_fails_is_replaced_and_the_run_goes_on(new_line, node):
    line = new_line(steps=30, every=10)
    hold = line.book / "hold"
    hold.write_text("20")  # on a busy machine it could be through before anybody has seen its first checkpoint
    line.start()
    line.wait(lambda: any(e.step == 10 for e in line.committed()))
    before = line.fleet.ids
    (line.book / f"fails-{node}").write_text(ECC)
    hold.unlink()
    ended = line.end()
    assert ended.succeeded, ended
    after = line.fleet.ids
    assert after[node] != before[node], "the broken machine was kept"
    assert after[1 - node] == before[1 - node], "the other machine was not at fault"
    (interruption,) = line.record.interruptions
    assert interruption.nodes == [node]
    assert interruption.fault == Fault.INFRASTRUCTURE
    assert "a GPU's memory has failed" in interruption.reason
    line.judge()
