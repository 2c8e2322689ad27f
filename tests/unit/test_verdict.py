"""I7: what the nodes say decides the run's end, and one slow answer decides nothing."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status import AgentStatus, Fault, Notice, Phase

from mgpu.run.verdict import Action, NodeView, decide


def status(phase: Phase, *, attempt: int = 1, fault: Fault | None = None, reason: str = "", at: float = 1.0):
    return AgentStatus(
        run_id="r",
        attempt=attempt,
        node_rank=0,
        phase=phase,
        agent_pid=1,
        started_at=0,
        updated_at=at,
        fault=fault,
        reason=reason,
    )


def judge(*views: NodeView):
    return decide(views, attempt=1, silence_s=120)


def test_all_done_is_success():
    verdict = judge(NodeView(0, status(Phase.DONE)), NodeView(1, status(Phase.DONE)))
    assert (verdict.action, verdict.succeeded) == (Action.END, True)


def test_one_node_still_draining_is_not_the_end():
    assert judge(NodeView(0, status(Phase.DONE)), NodeView(1, status(Phase.DRAINING))).action is Action.WAIT


@pytest.mark.parametrize("seen", [None, status(Phase.DONE, attempt=0 + 2)])
def test_no_status_or_another_attempts_status_is_unknown_not_done(seen):
    assert judge(NodeView(0, status(Phase.DONE)), NodeView(1, seen)).action is Action.WAIT


def test_a_silent_node_is_unknown_until_its_deadline():
    views = (NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING), silent_s=119))
    assert judge(*views).action is Action.WAIT


def test_after_the_deadline_of_silence_the_others_are_stopped():
    verdict = judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING), silent_s=121))
    assert verdict.action is Action.STOP
    assert "node 1" in verdict.reason
    assert verdict.fault is Fault.INFRASTRUCTURE


def test_the_providers_word_is_believed_at_once():
    verdict = judge(NodeView(0, status(Phase.DONE)), NodeView(1, status(Phase.TRAINING), gone=True))
    assert verdict.action is Action.END
    assert not verdict.succeeded


def test_a_failed_node_stops_its_peers_then_names_the_cause():
    failed = status(Phase.FAILED, fault=Fault.USER, reason="the program ended with exit code 3", at=5.0)
    assert judge(NodeView(0, failed), NodeView(1, status(Phase.TRAINING))).action is Action.STOP
    stopped = status(Phase.FAILED, fault=Fault.STOPPED, reason="stopped", at=2.0)
    verdict = judge(NodeView(0, failed), NodeView(1, stopped))
    assert verdict.action is Action.END
    assert verdict.fault is Fault.USER
    assert "exit code 3" in verdict.reason


def test_of_two_failures_of_a_kind_the_first_one_is_the_cause():
    early = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="disk full", at=1.0)
    late = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="connection closed by peer", at=2.0)
    assert "disk full" in judge(NodeView(0, late), NodeView(1, early)).reason


def test_a_program_that_crashed_is_the_cause_of_the_peers_it_lost():
    peer = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="connection closed by peer", at=1.0)
    crashed = status(Phase.FAILED, fault=Fault.USER, reason="the program ended with exit code 1", at=2.0)
    verdict = judge(NodeView(0, peer), NodeView(1, crashed))
    assert verdict.fault is Fault.USER
    assert "node 1" in verdict.reason


def test_the_peers_are_stopped_while_the_failed_node_still_uploads():
    draining = status(Phase.DRAINING, fault=Fault.USER, reason="the program ended with exit code 1")
    assert judge(NodeView(0, draining), NodeView(1, status(Phase.TRAINING))).action is Action.STOP


@pytest.mark.parametrize(
    ("action", "fault", "words"),
    [("terminate", Fault.PROVIDER, "the provider takes"), ("lease", Fault.INFRASTRUCTURE, "lease cannot be renewed")],
)
def test_a_machine_that_goes_is_blamed_on_whoever_takes_it(action, fault, words):
    seen = status(Phase.TRAINING).model_copy(update={"notice": Notice(action=action, at=10, fits=True)})
    verdict = judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, seen))
    assert (verdict.action, verdict.now, verdict.fault, verdict.lost) == (Action.STOP, False, fault, (1,))
    assert words in verdict.reason
