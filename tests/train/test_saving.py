"""Saves in the background: disks that do not take them, ranks that die, other world sizes, a process that writes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from mgpu_train.checkpoint.distributed import dcp
from mgpu_train.checkpoint.distributed.dcp import Checkpointer, Progress, _share
from mgpu_train.checkpoint.distributed.saver import Saver
from mgpu_train.checkpoint.distributed.staging import Snapshot, Staging
from mgpu_train.checkpoint.distributed.writer_process import Outside
from mgpu_train.checkpoint.local import finished
from mgpu_train.checkpoint.state import ModelPart, OptimizerPart, Part
from mgpu_train.config import EarlyStopping
from mgpu_train.errors import TrainError
from mgpu_train.health.hardware import free_bytes
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.patience import Patience
from mgpu_train.parallel import Place
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.filesystem import FileSystemWriter

STORIES = Path(__file__).with_name("saves.py")
CPU = torch.device("cpu")
Tell = Callable[..., Path]


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Tell:
    """`tell("reshard")` runs a story of saves.py once and returns its folder."""
    told: dict[str, Path] = {}

    def run(story: str) -> Path:
        if story not in told:
            out = told[story] = tmp_path_factory.mktemp(story)
            for number in range(20):
                (out / "text").mkdir(exist_ok=True)
                (out / "text" / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog " * 8)
            teller = ranks.start(STORIES, [out, story], out / "said", os.environ)
            assert teller.wait() == 0, teller.said
        return told[story]

    return run


def codes(out: Path) -> Any:
    return json.loads((out / "codes.json").read_text())


def lines(home: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    found = map(json.loads, (home / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def steps(home: Path, kind: str, rank: int = 0) -> list[int]:
    return [line["step"] for line in lines(home, kind, rank)]


# --- disks (F32, F33) -------------------------------------------------------------------------------------------------

FULL, READ_ONLY = "[Errno 28] No space left on device", "[Errno 30] Read-only file system"
DISKS = {
    "room-none": FULL, "room-half": FULL, "room-all-but-a-page": FULL, "inodes-none": FULL, "inodes-2": FULL,
    "inodes-4": FULL, "read-only": READ_ONLY,
}  # fmt: skip


@pytest.fixture(scope="module")
def disks(tell: Tell, require: Any) -> Path:
    require("mounts", os.geteuid() == 0, "only root can mount")
    return tell("disks")


@pytest.mark.parametrize(("disk", "reason"), DISKS.items(), ids=DISKS)
def test_a_disk_that_does_not_take_a_save_costs_that_save_and_nothing_else(disks, disk, reason, same_bits):
    """F32, F33: on all ranks; the old one is kept, nothing is left behind, the next one stands once there is room."""
    home, plain = disks / disk, disks / "plain" / "checkpoints"
    assert codes(disks) == [0, 0]
    assert [path.name for path in (home / "after").iterdir()] == ["step-2"]
    same_bits(home / "after" / "step-2", plain / "step-2")
    assert sorted(path.name for path in (home / "end").iterdir()) == ["step-2", "step-6", "step-8"]
    same_bits(home / "end" / "step-8", plain / "step-8")
    for rank in (0, 1):
        assert steps(home, "step", rank) == list(range(1, 9))
        assert steps(home, "checkpoint", rank) == [2, 6, 8]
        (failed,) = lines(home, "save_failed", rank)
        assert failed["step"] == 4
        assert reason in failed["reason"]
        assert "\n" not in failed["reason"]


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "moment"), [(1, "write_data"), (0, "write_data"), (0, "finish"), (0, "publish")], ids=str
)
def test_a_rank_that_is_killed_while_it_writes_leaves_no_folder_that_looks_whole(tell, rank, moment):
    out, ends = tell("killed") / f"{rank}-{moment}", codes(tell("killed"))[f"{rank}-{moment}"]
    assert ends[rank] == -signal.SIGKILL
    assert ends[1 - rank] == 1  # soon: its peer is gone
    assert [step for step, _ in finished(out / "checkpoints")] == [2]


def test_a_node_that_cannot_rename_takes_the_checkpoint_from_all(tell):
    out = tell("unpublished")
    assert codes(out) == [0, 0]
    for rank in (0, 1):
        home = out / f"node-{rank}"
        assert sorted(path.name for path in (home / "checkpoints").iterdir()) == ["step-2", "step-6", "step-8"]
        (failed,) = lines(home, "save_failed", rank)
        assert (failed["step"], "rank 1: OSError: [Errno 30]" in failed["reason"]) == (4, True)


def test_training_ends_where_no_later_save_can_succeed(tell):
    """What gloo's groups do after a time-out: they fail for ever. To train on would be to lose all of it."""
    out = tell("late")
    assert codes(out) == [1, 1]
    assert [step for step, _ in finished(out / "checkpoints")] == [2]
    assert steps(out, "end") == []
    for rank in (0, 1):
        assert "in 4 s (save_s)" in (out / f"error-{rank}").read_text()


@pytest.mark.drawn("strategies of training", "train/mgpu_train/checkpoint")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_four_ranks_then_two_then_eight_go_on_as_if_never_interrupted(tell, strategy):
    """F52"""
    out = tell(f"reshard-{strategy}")
    assert set(codes(out)) == {0}
    homes = [out / name for name in ("0-of-4", "1-of-2", "2-of-8")]
    found = [(line["step"], line["loss"]) for home in homes for line in lines(home, "step")]
    whole = [line["loss"] for line in lines(out / "whole", "step")]
    assert [step for step, _ in found] == list(range(1, 10))
    assert [loss for _, loss in found] == pytest.approx(whole, rel=1e-4)
    shards = list((homes[2] / "checkpoints" / "step-9").glob("__?_0.distcp"))
    assert len(shards) == 8


# --- nodes that have what their ranks read ----------------------------------------------------------------------------

PARTED = {"same": (4, 2), "swapped": (4, 2), "whole": (2, 1), "fewer": (3, 3), "more": (8, 4)}
OF_ALL = {".metadata", "meta.json", *(f"__{rank}_common_0.distcp" for rank in range(4))}


def joined(homes: list[Path], step: int, into: Path) -> Path:
    """What all nodes have of a checkpoint, in one folder."""
    for home in homes:
        shutil.copytree(home / "checkpoints" / f"step-{step}", into, dirs_exist_ok=True)
    return into


@pytest.mark.parametrize("layout", PARTED)
def test_a_node_fetches_what_its_ranks_read_and_they_have_the_same_bits(tell, layout, tmp_path, same_bits):
    """F52: at as many ranks, fewer and more, of which some have no row of some tensors."""
    out, (world_size, nodes) = tell("parted"), PARTED[layout]
    assert set(codes(out)) == {0}
    homes = [out / layout / f"node-{node}" for node in range(nodes)]
    for node, home in enumerate(homes):
        of_node = range(node * world_size // nodes, (node + 1) * world_size // nodes)
        read = {name for rank in of_node for name in json.loads((home / f"read-{rank}.json").read_text())}
        fetched = {path.name for path in (out / layout / f"node-{node}" / "resume").iterdir()}
        lost = {"__3_0.distcp"} if (layout, node) == ("same", 1) else set()  # taken away afterwards
        assert fetched | lost == read | {".metadata", "meta.json"}
    step = 6 if layout == "same" else 4
    before = joined([out / "node-0", out / "node-1"], step, tmp_path / "before")
    after = joined(homes, step, tmp_path / "after")
    same_bits(before, after)


def test_no_shard_is_fetched_by_a_node_that_does_not_read_it_or_has_it(tell):
    """As many ranks on as many nodes: beside what all read, each has what it saved, or what the other one did."""
    out = tell("parted")
    sizes = {path.name: path.stat().st_size for path in (out / "store").rglob("*.distcp")}
    sizes |= {path.name: path.stat().st_size for path in (out / "node-0" / "checkpoints" / "step-4").iterdir()}
    shards = [{"__0_0.distcp", "__1_0.distcp"}, {"__2_0.distcp", "__3_0.distcp"}]
    commons = [{"__0_common_0.distcp", "__1_common_0.distcp"}, {"__2_common_0.distcp", "__3_common_0.distcp"}]
    texts = {".metadata", "meta.json"}
    expected = {
        ("same", 0): commons[1],
        ("same", 1): commons[0] | texts,
        ("swapped", 0): shards[0] | commons[0] | texts,
        ("swapped", 1): shards[1] | commons[1],
        ("whole", 0): {*shards[0], *shards[1], *OF_ALL},
        ("fewer", 0): {*shards[0], *OF_ALL},  # 4 rows of 10, where a rank had 3
        ("more", 3): {"__3_0.distcp", *OF_ALL},
    }
    for (layout, node), names in expected.items():
        fetched = json.loads((out / layout / f"node-{node}" / "fetched.json").read_text())
        assert fetched == {name: sizes[name] for name in names}, (layout, node)


def test_a_node_that_lacks_what_its_ranks_read_says_which_file(tell):
    for rank in range(4):
        error = (tell("parted") / "same" / f"node-{rank // 2}" / f"error-{rank}").read_text()
        assert "cannot resume from" in error
        assert "rank 3: `" in error
        assert "is in __3_0.distcp, which is not there. A node is given what its ranks read" in error


# --- one rank, without others -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone(Place):
    """A place that needs no process group."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)  # as a BatchNorm does
        return self.linear(given).sum()


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part]:
    return {"model": ModelPart(model), "optimizer": OptimizerPart(model, optimizer)}


class One:
    """One rank that trains a small model."""

    def __init__(self, outside_s: float | None = None) -> None:
        torch.manual_seed(1)
        self.model = Small()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        place = Alone(0, 0, 1, CPU, None, None)  # type: ignore[arg-type]
        self.checkpointer = Checkpointer(
            parts_of(self.model, self.optimizer), place, "rank0", {"config": {}}, outside_s=outside_s
        )
        self.step()

    def forward(self) -> None:
        self.model(torch.ones(2, 5)).backward()

    def step(self) -> None:
        self.forward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        kept = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *self.model.buffers(), *kept)]

    def loaded(self, folder: Path) -> list[torch.Tensor]:
        other = One()
        other.checkpointer.load(folder)
        return other.values()


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.fixture
def one() -> Iterator[One]:
    made = One()
    yield made
    made.checkpointer.close()


@pytest.fixture
def beside() -> Iterator[One]:
    """One whose shards are written by a process of its own."""
    made = One(outside_s=60)
    yield made
    made.checkpointer.close()


class Payload:
    """Unpickled as everything is by default, it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("where", ["in place of the metadata", "in the metadata", "in place of the progress"])
def test_what_somebody_else_has_pickled_is_not_run_by_a_resume(one, tmp_path, where):
    one.checkpointer.save(tmp_path, Progress(1, 2))
    folder, made = tmp_path / "step-1", tmp_path / "made"
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - its own
    if where == "in place of the progress":
        (piece,) = [each for index, each in metadata.storage_data.items() if index.fqn == "progress.step"]
        metadata.storage_data = {
            index: replace(each, relative_path="payload", offset=0, length=10_000)
            if each == piece else each
            for index, each in metadata.storage_data.items()
        }  # fmt: skip
        torch.save(Payload(made), folder / "payload")
    else:
        metadata.planner_data = Payload(made)
        metadata = Payload(made) if where == "in place of the metadata" else metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(TrainError, match=r"mkdir|progress\.step is damaged, or no plain value"):
        One().checkpointer.load(folder)
    assert not made.exists()


def test_files_outside_of_a_checkpoint_are_no_part_of_it(one, tmp_path):
    one.checkpointer.save(tmp_path, Progress(1, 2))
    folder = tmp_path / "step-1"
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - its own
    for index, each in metadata.storage_data.items():
        metadata.storage_data[index] = replace(each, relative_path=f"../step-1/{each.relative_path}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(TrainError, match="outside of the checkpoint"):
        One().checkpointer.load(folder)


def test_what_a_forward_pass_changes_is_copied_before_it(one, tmp_path):
    before = one.values()
    capture = one.checkpointer.capture(Progress(1, 2))
    one.forward()
    assert not same(one.values(), before)
    one.checkpointer.write(capture, tmp_path)
    assert same(one.loaded(tmp_path / "step-1"), before)


def test_a_parameter_that_had_no_gradient_is_no_reason_against_a_resume(tmp_path, caplog, monkeypatch):
    """A layer that nothing uses, an expert without tokens: optimizers keep nothing of it, and it begins anew."""
    split = state_dict._split_optim_state_dict

    def as_torch_2_8(model, optim, found, info):
        missing = {name for group in found["param_groups"] for name in group["params"]} - found["state"].keys()
        assert not missing, "a KeyError, also without `strict`"
        return split(model, optim, found, info)

    monkeypatch.setattr(state_dict, "_split_optim_state_dict", as_torch_2_8)

    def made(names: tuple[str, ...]) -> tuple[nn.ModuleDict, torch.optim.Optimizer, Checkpointer]:
        torch.manual_seed(2)
        model = nn.ModuleDict({"used": nn.Linear(5, 3), "idle": nn.Linear(5, 2)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for name in names:
            model[name](torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        parts, place = parts_of(model, optimizer), Alone(0, 0, 1, CPU, None, None)  # type: ignore[arg-type]
        return model, optimizer, Checkpointer(parts, place, "all", {})

    before, kept, checkpointer = made(("used",))
    checkpointer.save(tmp_path, Progress(1, 2))
    after, begun, checkpointer = made(())
    assert checkpointer.load(tmp_path / "step-1") == Progress(1, 2)
    assert same(list(after.parameters()), list(before.parameters()))
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert kept.state.get(one, {}).keys() == begun.state.get(other, {}).keys()
        assert same(list(kept.state.get(one, {}).values()), list(begun.state.get(other, {}).values()))
    assert len(begun.state) == 2
    assert "begin anew: optimizer.state.idle.bias, optimizer.state.idle.weight" in caplog.text

    made(("used", "idle"))[2].save(tmp_path, Progress(2, 4))
    metadata = pickle.loads((tmp_path / "step-2" / ".metadata").read_bytes())  # noqa: S301 - its own
    del metadata.state_dict_metadata["optimizer.state.idle.weight.exp_avg"]
    (tmp_path / "step-2" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(TrainError, match=r"another optimizer: `state\.idle\.weight\.exp_avg` is absent"):
        made(())[2].load(tmp_path / "step-2")


def test_patience_with_another_value_than_the_checkpoints_begins_anew(tmp_path):
    """Else a loss, which is never below an accuracy of before, would end training in silence."""

    def made(**watched: Any) -> tuple[Patience, Checkpointer]:
        patience, linear = Patience(EarlyStopping(patience=2, **watched)), nn.Linear(5, 3)
        parts = {**parts_of(linear, torch.optim.AdamW(linear.parameters())), "patience": patience}
        return patience, Checkpointer(parts, Alone(0, 0, 1, CPU, None, None), "all", {})  # type: ignore[arg-type]

    before, checkpointer = made(metric="accuracy", mode="max")
    for accuracy in (0.9, 0.8):
        before.take({"accuracy": accuracy})
    checkpointer.save(tmp_path, Progress(1, 2))
    for watched, over in (({"metric": "accuracy", "mode": "max"}, True), ({"metric": "loss"}, False)):
        patience, checkpointer = made(**watched)
        checkpointer.load(tmp_path / "step-1")
        for loss in (0.5, 0.4):
            patience.take({"accuracy": 0.85, "loss": loss})
        assert patience.over is over


def test_memory_is_laid_out_once(one, tmp_path):
    one.checkpointer.save(tmp_path, Progress(1, 2))
    staging = one.checkpointer._staging
    places = staging._places
    for step in (2, 3):
        one.step()
        one.checkpointer.save(tmp_path, Progress(step, 2 * step))
        assert same(one.loaded(tmp_path / f"step-{step}"), one.values())
    assert staging._places is places
    assert len(places) == 8  # two parameters; two moments and a count of each


def test_beside_a_gpu_memory_is_laid_out_before_the_first_save_and_it_is_that_of_the_save(beside, one, tmp_path):
    staging, before = beside.checkpointer._staging, beside.values()
    beside.checkpointer.lay_out()
    places = staging._places
    assert len(places) == 8
    beside.checkpointer.save(tmp_path, Progress(1, 2))
    assert staging._places is places
    assert same(beside.loaded(tmp_path / "step-1"), before)
    one.checkpointer.lay_out()
    assert not one.checkpointer._staging.size, "on a CPU no save waits for it"


@pytest.mark.parametrize("kind", ["one", "beside"])
def test_shards_have_no_crc_32_and_what_else_torch_saves_has(request, kind, tmp_path):
    made = request.getfixturevalue(kind)
    made.checkpointer.save(tmp_path, Progress(1, 2))
    (shards,) = (tmp_path / "step-1").glob("*_0.distcp")
    data = shards.read_bytes()
    sums = [
        int.from_bytes(data[at + 16 : at + 20], "little")
        for at in range(len(data))
        if data.startswith(b"PK\x01\x02", at) and b"/data/" in data[at + 46 : at + 80]
    ]
    assert len(sums) >= 8
    assert set(sums) == {0}
    torch.save(torch.arange(9), tmp_path / "own.pt")
    assert all(each.CRC for each in zipfile.ZipFile(tmp_path / "own.pt").infolist() if each.file_size)


@dataclass(frozen=True)
class Met(Place):
    """One of several ranks that are threads."""

    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    told: list[Any] = field(default_factory=lambda: [None])

    def gather(self, value: Any) -> list[Any]:
        self.told[self.rank] = value
        self.met.wait(10)
        found = list(self.told)
        self.met.wait(10)
        return found


def shares_of(states: list[dict[str, Any]], stages: int = 1) -> list[dict[str, Any]]:
    """What each rank saves, of what each holds."""
    count = len(states)
    met, told = threading.Barrier(count), [None] * count
    places = [
        Met(each, each, count, CPU, None, None, pipeline=stages, met=met, told=told)  # type: ignore[arg-type]
        for each in range(count)
    ]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(_share, states, places))


def test_ranks_share_out_what_they_hold_alike_and_none_copies_all_of_it():
    alike = {str(number): torch.zeros(number + 1) for number in range(20)}
    state = {"model": alike, "optimizer": {"state": {"0": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}}
    shares = shares_of([state] * 3)
    names = [[*share["model"], *share["optimizer"]["state"]["0"]] for share in shares]
    assert sorted(name for each in names for name in each) == sorted([*alike, "step"])
    sizes = [sum(tensor.numel() for tensor in share["model"].values()) for share in shares]
    assert max(sizes) <= min(sizes) + 20
    assert all(share["optimizer"]["param_groups"] == [{"lr": 0.1}] for share in shares)


def test_each_tensor_is_saved_once_also_where_a_rank_does_not_hold_it():
    """Two stages of three ranks, of which each rank of the second one lacks another tensor."""
    first, second = ({f"{stage}.{n}": torch.zeros(1) for n in range(7)} for stage in range(2))
    lacking = [{name: each for name, each in second.items() if name != f"1.{rank}"} for rank in range(3)]
    shares = shares_of([{"model": each} for each in (first, first, first, *lacking)], stages=2)
    assert sorted(name for share in shares for name in share["model"]) == sorted([*first, *second])


def test_staging_takes_every_shape_and_type():
    tensors = [
        torch.randn(3, 4), torch.zeros(0, 7), torch.tensor(2.5), torch.randn(6, 4).t(), torch.arange(5),
        torch.randn(9).bfloat16(), torch.tensor([True, False]),
    ]  # fmt: skip
    for shared in (False, True):
        staging = Staging(CPU, shared=shared)
        for given in (tensors, tensors[:2]):  # other ones are laid out anew
            places = staging.lay_out(given)
            staging.copy(given, places)
            assert same(places, given)
            assert all(place.untyped_storage().nbytes() == place.nbytes for place in places)
        del places
        staging.close()


def test_a_copy_that_fails_does_not_keep_training_waiting():
    staging = Staging(CPU)
    tensor = torch.ones(3)
    snapshot = Snapshot({"w": tensor}, {tensor.untyped_storage().data_ptr()}, staging)
    staging.lay_out = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        snapshot.fill()
    assert snapshot.filled.is_set()


def test_a_save_tells_once_what_has_become_of_it(one, tmp_path, monkeypatch):
    saver = Saver(one.checkpointer, tmp_path, 60)
    assert saver.poll() is None
    assert saver.wait() is None
    go = threading.Event()
    finish = FileSystemWriter.finish
    monkeypatch.setattr(FileSystemWriter, "finish", lambda *given, **named: (go.wait(60), finish(*given, **named)))
    saver.begin(Progress(1, 2), {"loss": 0.5})
    saver.settle()
    assert saver.busy
    assert saver.poll() is None
    go.set()
    outcome = saver.wait()
    assert outcome is not None
    assert (outcome.progress, outcome.reason) == (Progress(1, 2), None)
    assert outcome.stall_s > 0
    assert saver.poll() is None
    assert json.loads((tmp_path / "step-1" / "meta.json").read_text())["loss"] == 0.5


STATE = 3 * 4 * (5 * 3 + 3)  # bytes of its weights and moments
NEEDS: list[tuple[str, list[str], int, float]] = [
    ("rank0", ["here", "here"], 0, STATE),
    ("rank0", ["there", "here"], 1, 0),
    ("all", ["here", "here"], 0, STATE),
    ("all", ["here", "there", "here", "there"], 0, STATE / 2),
]


@pytest.mark.parametrize(("writers", "machines", "rank", "needed"), NEEDS)
def test_what_a_save_copies_has_room_in_the_memory_of_a_machine_or_is_refused(
    monkeypatch, writers, machines, rank, needed
):
    """Before anything is trained, by all ranks."""

    @dataclass(frozen=True)
    class Among(Place):
        def gather(self, value: Any) -> list[Any]:
            if not isinstance(value, tuple):
                return [value]
            parts = [STATE / len(machines)] * len(machines) if writers == "all" else [STATE, *[0] * len(machines)]
            assert value == (machines[rank], parts[rank])
            return list(zip(machines, parts, strict=False))

    place = Among(rank, rank, len(machines), CPU, None, None)  # type: ignore[arg-type]
    linear = nn.Linear(5, 3)
    checkpointer = Checkpointer(parts_of(linear, torch.optim.AdamW(linear.parameters())), place, writers, {})  # type: ignore[arg-type]
    monkeypatch.setattr(dcp, "machine", lambda: machines[rank])
    monkeypatch.setattr(dcp, "free_bytes", lambda: needed)
    checkpointer.require_memory(STATE)
    monkeypatch.setattr(dcp, "free_bytes", lambda: needed - 1)
    with pytest.raises(TrainError, match=rf"of this machine's memory.*writers: {writers}`.*Take machines"):
        checkpointer.require_memory(STATE)


def test_memory_that_is_free_is_what_the_kernel_and_the_container_leave(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:     4 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}

    def read_text(path: Path, **_: str) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert free_bytes() == 4096
    group = {"max": "4100\n", "current": "105\n", "stat": "anon 5\ninactive_file 100\n"}
    files |= {f"/sys/fs/cgroup/memory.{name}": text for name, text in group.items()}
    assert free_bytes() == 4095
    files.clear()
    assert free_bytes() == float("inf")


def test_a_disk_that_never_answers_is_given_up(one, tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(FileSystemWriter, "finish", lambda *_, **__: go.wait(60))
    saver = Saver(one.checkpointer, tmp_path, 0.1)
    assert not saver.lost
    saver.begin(Progress(1, 2), {})
    with pytest.raises(TrainError, match=r"the disk did not take the checkpoint in 0\.1 s \(save_s\)"):
        saver.wait()
    assert saver.busy
    assert saver.lost
    go.set()


def test_a_save_counts_its_time_from_its_begin(one, tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(FileSystemWriter, "finish", lambda *_, **__: go.wait(60))
    saver = Saver(one.checkpointer, tmp_path, 2)
    saver.begin(Progress(1, 2), {})
    time.sleep(2)
    began = time.monotonic()
    with pytest.raises(TrainError, match=r"in 2 s \(save_s\)"):
        saver.wait()
    assert time.monotonic() - began < 1
    go.set()


def test_a_collective_that_fails_is_the_last_one(one, tmp_path, monkeypatch):
    def gone(*_: Any) -> None:
        raise RuntimeError("Application timeout caused pair closure")

    saver = Saver(one.checkpointer, tmp_path, 60)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Alone, "gather", gone)
        saver.begin(Progress(1, 2), {})
        outcome = saver.wait()
    assert outcome is not None
    assert outcome.reason == f"cannot save {tmp_path / 'step-1'}: Application timeout caused pair closure"
    assert saver.lost


def test_a_rank_that_has_nothing_to_copy_later_saves_like_any_other(beside, tmp_path):
    """So it is where all is gathered to one rank: there is no place in the shared memory, and no event of a GPU."""
    capture = beside.checkpointer.capture(Progress(1, 2))
    copied = Snapshot(capture.snapshot.state, set(), beside.checkpointer._staging)
    beside.checkpointer.write(replace(capture, snapshot=copied), tmp_path)
    assert same(beside.loaded(tmp_path / "step-1"), beside.values())


def test_a_gpu_that_computes_nothing_of_it_is_not_waited_for(monkeypatch):
    staging = Staging(CPU)
    staging._side = SimpleNamespace(wait_event=lambda event: event.wait(), synchronize=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(staging, "_pin", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    snapshot = Snapshot({}, set(), staging)
    snapshot.fill()
    assert snapshot.filled.is_set()


def test_what_an_earlier_save_left_is_swept_and_a_checkpoint_of_that_name_is_replaced(one, tmp_path):
    for name in (".tmp-step-7", ".tmp-step-1", "step-1", "step-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "litter").touch()
    one.checkpointer.save(tmp_path, Progress(1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1"]
    assert not (tmp_path / "step-1" / "litter").exists()
    assert (tmp_path / "step-0" / "litter").exists()


def test_a_save_that_fails_keeps_the_checkpoint_that_had_its_name(one, tmp_path, monkeypatch):
    one.checkpointer.save(tmp_path, Progress(1, 2))
    kept = one.values()
    one.step()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "finish", full)
    with pytest.raises(TrainError, match=r"cannot save .*step-1: rank 0: OSError: \[Errno 28\]"):
        one.checkpointer.save(tmp_path, Progress(1, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert same(one.loaded(tmp_path / "step-1"), kept)


# --- a process that writes --------------------------------------------------------------------------------------------


def writer(one: One) -> Outside:
    assert one.checkpointer._outside is not None
    return one.checkpointer._outside


def test_a_process_that_writes_ignores_the_signals_of_its_group_and_ends_with_its_parent(beside, tmp_path):
    beside.checkpointer.save(tmp_path, Progress(1, 2))
    assert same(beside.loaded(tmp_path / "step-1"), beside.values())
    process = writer(beside)._process
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    beside.step()
    beside.checkpointer.save(tmp_path, Progress(2, 4))
    assert same(beside.loaded(tmp_path / "step-2"), beside.values())
    writer(beside)._line.close()  # as the kernel does when a process ends
    assert process.wait(30) == 0


def test_a_process_that_dies_costs_one_save_and_is_started_again(beside, tmp_path):
    beside.checkpointer.save(tmp_path, Progress(1, 2))
    first = writer(beside).pid
    os.kill(first, signal.SIGSTOP)
    capture = beside.checkpointer.capture(Progress(2, 4))
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    with pytest.raises(TrainError, match=r"rank 0: OSError: the process that writes died, exit code -9"):
        beside.checkpointer.write(capture, tmp_path)
    beside.checkpointer.save(tmp_path, Progress(3, 6))
    assert writer(beside).pid != first
    assert [step for step, _ in finished(tmp_path)] == [1, 3]


def test_a_process_that_hangs_is_given_up(tmp_path):
    hanging = One(outside_s=0.2)
    os.kill(writer(hanging).pid, signal.SIGSTOP)
    with pytest.raises(TrainError, match=r"the process that writes did not answer in 0\.2 s \(save_s\)"):
        hanging.checkpointer.save(tmp_path, Progress(1, 2))
    assert list(tmp_path.iterdir()) == []
    hanging.checkpointer.close()


def test_what_a_process_that_writes_cannot_do_is_an_error_like_any_other(beside, tmp_path, monkeypatch):
    def in_the_way(_folder: Path, aside: Path) -> None:
        (aside / "__0_0.distcp").mkdir(parents=True)

    monkeypatch.setattr("mgpu_train.checkpoint.distributed.dcp._make_room", in_the_way)
    with pytest.raises(TrainError, match=r"rank 0: IsADirectoryError: \[Errno 21\] Is a directory"):
        beside.checkpointer.save(tmp_path, Progress(1, 2))
    assert list(tmp_path.iterdir()) == []


# --- metrics on a full disk -------------------------------------------------------------------------------------------


def test_metrics_that_a_full_disk_does_not_take_are_written_once_there_is_room(tmp_path):
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    metrics = MetricLines(tmp_path, rank=0)
    for step in (1, 2):
        metrics.write("step", step=step, loss=2.5)
    assert metrics._file is not None
    with (tmp_path / "room").open("ab") as room:
        os.dup2(room.fileno(), metrics._file.fileno())
    metrics.write("step", step=3, loss=2.5)
    first, *told = (tmp_path / "room").read_text().splitlines()
    assert first == ""  # what this device reads as is no whole line
    assert [json.loads(line)["step"] for line in told] == [1, 2, 3]
