"""I7: what the nodes say decides the run's end, and one slow answer decides nothing."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status.status import AgentStatus, Fault, Notice, Phase

from mgpu.run.supervision.health import Action, NodeView, decide


def status(
    phase: Phase,
    *,
    attempt: int = 1,
    fault: Fault | None = None,
    reason: str = "",
    at: float = 1.0,
    fits: bool | None = None,
    suspect: bool = False,
):
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
        suspect=suspect,
        notice=None if fits is None else Notice(action="terminate", at=9.0, fits=fits),
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


# --- losses -----------------------------------------------------------------------------------------------------------

CUT_OFF = status(Phase.FAILED, fault=Fault.USER, reason="connection closed by peer", at=1.0)


def test_a_machine_that_is_gone_is_the_providers_doing_and_has_to_be_replaced():
    verdict = judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING), gone=True, why="spot"))
    assert (verdict.action, verdict.now) == (Action.STOP, True)
    assert (verdict.fault, verdict.lost) == (Fault.PROVIDER, (1,))
    assert verdict.reason == "node 1 is gone (spot)"


def test_a_machine_that_is_silent_for_too_long_is_replaced_too():
    verdict = judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING), silent_s=121))
    assert (verdict.fault, verdict.lost, verdict.now) == (Fault.INFRASTRUCTURE, (1,), True)


def test_what_the_survivors_say_of_their_end_never_wins_over_the_loss():
    verdict = judge(NodeView(0, CUT_OFF), NodeView(1, CUT_OFF, gone=True))
    assert (verdict.action, verdict.fault, verdict.lost) == (Action.END, Fault.PROVIDER, (1,))


def test_what_a_node_said_before_it_fell_silent_stands():
    verdict = judge(NodeView(0, status(Phase.DONE)), NodeView(1, CUT_OFF, silent_s=121))
    assert (verdict.action, verdict.fault) == (Action.END, Fault.USER)


def test_a_machine_that_goes_after_its_node_was_done_takes_nothing_away():
    done = status(Phase.DONE)
    assert judge(NodeView(0, done), NodeView(1, done, gone=True)).succeeded
    assert judge(NodeView(0, status(Phase.DRAINING)), NodeView(1, done, gone=True)).action is Action.WAIT
    verdict = judge(NodeView(0, CUT_OFF), NodeView(1, done, gone=True))
    assert (verdict.fault, verdict.lost) == (Fault.USER, (1,)), "whoever goes on needs another machine"


def test_an_agent_that_died_is_a_failure_of_its_node_and_its_machine_stays():
    views = (NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING), dead=True))
    assert (judge(*views).action, judge(*views).now) == (Action.STOP, True)
    stopped = status(Phase.FAILED, fault=Fault.STOPPED, reason="this node was asked to stop")
    verdict = judge(NodeView(0, stopped), views[1])
    assert (verdict.action, verdict.fault, verdict.lost) == (Action.END, Fault.INFRASTRUCTURE, ())
    assert verdict.reason == "node 1: its agent died"


# --- notices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False])
def test_a_notice_stops_everybody_and_saves_only_what_fits(fits):
    verdict = judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, status(Phase.TRAINING, fits=fits)))
    assert (verdict.action, verdict.now) == (Action.STOP, not fits)
    assert (verdict.fault, verdict.lost) == (Fault.PROVIDER, (1,))


def test_peers_that_end_as_they_were_told_cost_nobody_his_save():
    ended = status(Phase.DRAINING, fault=Fault.STOPPED, reason="this node was asked to stop")
    assert judge(NodeView(0, ended), NodeView(1, status(Phase.TRAINING, fits=True))).now is False
    assert judge(NodeView(0, ended), NodeView(1, status(Phase.TRAINING))).now is False
    assert judge(NodeView(0, CUT_OFF), NodeView(1, status(Phase.TRAINING, fits=True))).now is True


def test_once_it_is_over_the_machine_that_goes_is_the_cause():
    noticed = status(Phase.FAILED, fault=Fault.PROVIDER, reason="the provider takes this machine in 9 s", fits=True)
    verdict = judge(NodeView(0, CUT_OFF), NodeView(1, noticed))
    assert (verdict.action, verdict.fault, verdict.lost) == (Action.END, Fault.PROVIDER, (1,))
    assert verdict.reason == "node 1: the provider takes the machine"


def test_a_machine_that_goes_is_replaced_though_its_own_node_was_done():
    stopped = status(Phase.FAILED, fault=Fault.STOPPED, reason="this node was asked to stop")
    assert judge(NodeView(0, stopped), NodeView(1, status(Phase.DONE, fits=True))).lost == (1,)


def test_a_run_that_is_done_within_the_notice_succeeded():
    assert judge(NodeView(0, status(Phase.DONE)), NodeView(1, status(Phase.DONE, fits=False))).succeeded


def test_an_older_attempts_notice_is_not_this_ones():
    view = NodeView(1, status(Phase.TRAINING, attempt=2, fits=True))
    assert judge(NodeView(0, status(Phase.TRAINING)), view).action is Action.WAIT


def overdue(phase: Phase = Phase.TRAINING, **more) -> AgentStatus:
    return status(phase, **more).model_copy(update={"overdue": True, "quiet_s": 780.0})


def test_a_node_whose_time_is_over_ends_nothing_while_another_is_at_work():
    assert judge(NodeView(0, status(Phase.TRAINING)), NodeView(1, overdue())).action is Action.WAIT
    assert judge(NodeView(0, status(Phase.DONE)), NodeView(1, overdue())).action is Action.WAIT
    assert judge(NodeView(0, None), NodeView(1, overdue())).action is Action.WAIT


def test_agents_that_never_heard_of_each_other_are_judged_by_whoever_sees_all():
    verdict = judge(NodeView(0, overdue()), NodeView(1, overdue(Phase.LAUNCHING)))
    assert (verdict.action, verdict.now, verdict.lost) == (Action.STOP, True, ())
    assert verdict.reason == "no sign of progress on any of 2 nodes for 780 s"
    # and it stays the reason when they have done as they were asked
    asked = overdue(Phase.FAILED, fault=Fault.STOPPED, reason="this node was asked to stop")
    after = judge(NodeView(0, asked), NodeView(1, asked))
    assert (after.action, after.reason, after.fault) == (Action.END, verdict.reason, Fault.USER)


def test_the_rank_that_others_waited_for_is_told_from_whichever_node_knows_it():
    """The first node to end an attempt as hung is often one whose ranks only wait."""
    words = "rank 1 is in data.py:5 (load)"
    knows = status(Phase.FAILED, fault=Fault.STOPPED, reason="asked to stop", at=2.0).model_copy(
        update={"hang": words, "missing_rank": 1}
    )
    hung = status(Phase.FAILED, fault=Fault.USER, reason="no sign; rank 0 waits", at=1.0)
    waits = hung.model_copy(update={"hang": "rank 0 waits"})
    assert judge(NodeView(0, waits), NodeView(1, knows)).reason == f"node 0: no sign; rank 0 waits; node 1: {words}"
    crashed = status(Phase.FAILED, fault=Fault.USER, reason="ValueError", at=1.0)
    assert judge(NodeView(0, crashed), NodeView(1, knows)).reason == "node 0: ValueError", "that is why the other waits"
    unheard = {"overdue": True, "quiet_s": 780.0}
    both = NodeView(0, waits.model_copy(update=unheard)), NodeView(1, knows.model_copy(update=unheard))
    assert judge(*both).reason == f"no sign of progress on any of 2 nodes for 780 s; node 1: {words}"


@pytest.mark.parametrize("starved", [True, False])
def test_a_program_that_a_machine_had_no_memory_for_is_told_from_others(starved):
    killed = status(Phase.FAILED, fault=Fault.USER, reason="SIGKILL").model_copy(update={"starved": starved})
    peer = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="gloo: connection closed")
    verdict = judge(NodeView(0, peer), NodeView(1, killed))
    assert (verdict.fault, verdict.reason, verdict.starved) == (Fault.USER, "node 1: SIGKILL", starved)
    ill = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="ECC", suspect=True)
    assert not judge(NodeView(0, ill), NodeView(1, killed)).starved, "evidence of a broken machine comes first"


def test_a_machine_that_seems_broken_is_replaced_and_named_whatever_its_peers_make_of_it():
    """Its peers' programs crash over it: with another rank's exit code, and earlier."""
    peer = status(Phase.FAILED, fault=Fault.USER, reason="exit code 1", at=1.0)
    broken = status(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="ECC", at=2.0, suspect=True)
    verdict = judge(NodeView(0, peer), NodeView(1, broken))
    assert (verdict.action, verdict.fault) == (Action.END, Fault.INFRASTRUCTURE)
    assert (verdict.reason, verdict.lost) == ("node 1: ECC", (1,))
