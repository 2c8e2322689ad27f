"""The trainer's parts that need no process group."""

from __future__ import annotations

import copy
import errno
import functools
import json
import math
import os
import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mgpu_train import engines, loop
from mgpu_train.checkpoint.distributed.meta import differences
from mgpu_train.config import CheckpointTarget, EarlyStopping, Job, ModelConfig, TrainConfig
from mgpu_train.data.loader import Loader
from mgpu_train.data.order import Slices
from mgpu_train.engines.buffers import Buffers
from mgpu_train.engines.fit import Fit
from mgpu_train.engines.plain import Plain
from mgpu_train.engines.scale import HIGHEST, LossScale
from mgpu_train.environment import read_job
from mgpu_train.errors import TrainError
from mgpu_train.loop import Trainer
from mgpu_train.metrics.lines import MetricLines
from mgpu_train.metrics.patience import Patience
from mgpu_train.metrics.sums import Sums
from mgpu_train.models.gpt import GPT
from mgpu_train.optim import base as optim
from mgpu_train.optim.ema import Average
from mgpu_train.optim.schedule import learning_rate
from mgpu_train.signals import SaveClock
from mgpu_train.step import set_streams
from mgpu_train.strategies import initial, memory, precision
from mgpu_train.strategies.fsdp import Shards
from mgpu_train.strategies.single import Single
from mgpu_train.tasks.base import Batch, Layout, Loss, Task
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TINY = ModelConfig(layers=2, dim=32, heads=2)


def target(**given) -> CheckpointTarget:
    return CheckpointTarget(to="file:///x", writers="all", **given)


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [
        ({"pipeline": 2, "replicate": 1, "shard": 2, "tensor": 2}, ["shard"]),
        ({"pipeline": 1, "replicate": 2, "shard": 2, "tensor": 2}, ["replicate", "shard"]),
    ],
)
def test_shards_have_no_all_reduce_among_one_copy_of_the_model(monkeypatch, sizes, shared):
    meshes: list[Any] = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda _module, *, mesh, mp_policy: meshes.append(list(mesh.sizes))
    )
    place: Any = SimpleNamespace(
        mesh=Mesh(sizes), gather=lambda value: [value], device=torch.device("cpu"), world_size=8
    )
    Shards(place, precision.POLICIES["fp32"]).apply(nn.Sequential(nn.Linear(2, 2)), Layout(blocks=("0",)))
    assert meshes == [shared, shared]


class Mesh:
    """A device mesh without ranks: how many there are, by dimension."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        return Mesh({name: self.sizes[name] for name in ((names,) if isinstance(names, str) else names)})

    def size(self) -> int:
        return math.prod(self.sizes.values())


@pytest.mark.parametrize(("name", "allowed"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_convolutions_lose_bits_only_where_products_may(monkeypatch, name, allowed):
    """Torch allows it in convolutions, unless it is told not to."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    products = torch.get_float32_matmul_precision()
    try:
        precision.allow(precision.POLICIES[name], torch.device("cuda"))
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision() == "high") == (allowed, allowed)
    finally:
        torch.set_float32_matmul_precision(products)


@pytest.mark.parametrize(
    ("low", "between"), [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_what_is_handed_from_block_to_block_has_the_types_of_the_policy(low, between):
    model, seen = GPT(TINY, 8), list[torch.dtype]()
    model.initialise()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
    with torch.autocast("cpu", low, enabled=low is not None):
        logits = model(torch.zeros(1, 8, dtype=torch.long))
    assert seen == [between] * TINY.layers
    assert logits.dtype == (low or torch.float32)


def test_a_model_begins_as_validations_leave_it_since_a_resume_may_begin_without_one():
    class Quiet(Task):
        """Whose library makes models that draw nothing, as `from_pretrained` does."""

        def data(self, split: Any) -> Any: ...

        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()

        def initialise(self, model: nn.Module) -> None:
            model[0].reset_parameters()  # type: ignore[index]

        def loss(self, model: nn.Module, batch: Batch) -> Loss: ...

    place: Any = SimpleNamespace(device=torch.device("cpu"), parted=False, context=1, copies=1)
    model, _ = initial.spread(Single(place, precision.POLICIES["fp32"]), Quiet(None), TrainConfig())
    assert all(each.training for each in model.modules())


class TestLearningRate:
    config = TrainConfig(steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.1)

    def test_warms_up_peaks_and_ends_at_the_floor(self):
        rates = [learning_rate(step, self.config) for step in range(1, 101)]
        assert rates[0] == pytest.approx(0.1)
        assert rates[9] == max(rates) == 1.0
        assert rates[99] == min(rates[9:]) == pytest.approx(0.1)
        assert rates[54] == pytest.approx(0.55)
        assert rates[9:] == sorted(rates[9:], reverse=True)

    def test_a_range_of_rates_grows_by_the_same_factor(self):
        config = TrainConfig(steps=5, lr_from=1e-4, lr=1.0)
        assert [learning_rate(step, config) for step in range(1, 6)] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.0])

    def test_a_warm_up_longer_than_training_and_none_at_all(self):
        assert learning_rate(5, TrainConfig(steps=5, warmup_steps=10, lr=1.0)) == 0.5
        assert learning_rate(1, TrainConfig(steps=1, warmup_steps=0, lr=1.0)) == pytest.approx(0.1)


class TestSaveClock:
    def test_steps(self):
        clock = SaveClock(target(every_steps=5))
        assert [step for step in range(1, 21) if clock.due(step)] == [5, 10, 15, 20]
        assert not clock.overdue()

    def test_minutes_count_from_the_last_save(self):
        now = 100.0
        clock = SaveClock(target(every_minutes=2), lambda: now)
        now = 219.0
        assert not clock.overdue()
        now = 220.0
        assert clock.overdue()
        clock.restart()
        assert not clock.overdue()

    def test_without_checkpoints_never(self):
        clock = SaveClock(None)
        assert not clock.overdue()
        assert not any(clock.due(step) for step in range(1, 1000))


class TestMetricLines:
    def test_each_line_can_be_read_as_soon_as_it_is_written(self, tmp_path):
        metrics = MetricLines(tmp_path / "metrics", rank=3)
        metrics.write("step", step=1, loss=2.5)
        (line,) = (tmp_path / "metrics" / "rank-3.jsonl").read_text().splitlines()
        assert {**json.loads(line), "t": 0} == {"kind": "step", "t": 0, "step": 1, "loss": 2.5}

    def test_attempts_follow_each_other_and_a_torn_line_hurts_only_itself(self, tmp_path):
        path = tmp_path / "rank-0.jsonl"
        path.write_text('{"kind": "step", "st')
        metrics = MetricLines(tmp_path, rank=0)
        metrics.write("end", step=1, reason="done")
        metrics.close()
        MetricLines(tmp_path, rank=0).write("end", step=2, reason="done")
        torn, *whole = path.read_text().splitlines()
        assert torn == '{"kind": "step", "st'
        assert [json.loads(line)["step"] for line in whole] == [1, 2]

    def test_a_number_that_json_cannot_hold_is_left_out(self, tmp_path):
        MetricLines(tmp_path, rank=0).write("step", loss=float("nan"), norm=float("inf"), lr=0.1)
        line = json.loads((tmp_path / "rank-0.jsonl").read_text())
        assert {**line, "t": 0} == {"kind": "step", "t": 0, "lr": 0.1}

    def test_without_a_folder_nothing_is_written(self):
        MetricLines(None, rank=0).write("end", step=1)


class TestDifferences:
    meta: ClassVar = {"strategy": "ddp", "text": "ab", "config": {"lr": 0.1, "seed": 1}}

    def test_names_what_has_changed_with_both_values(self, tmp_path):
        (tmp_path / "meta.json").write_text(json.dumps({"step": 3, **self.meta}))
        assert differences(tmp_path, self.meta) == []
        changed = {"strategy": "ddp", "text": "cd", "config": {"lr": 0.2, "seed": 1}}
        assert differences(tmp_path, changed) == ['text: "ab" -> "cd"', "lr: 0.1 -> 0.2"]

    def test_a_key_that_one_version_alone_knows_is_no_change(self, tmp_path):
        (tmp_path / "meta.json").write_text(json.dumps({**self.meta, "config": {"model": {"dim": 8, "old": 1}}}))
        now = {**self.meta, "config": {"model": {"dim": 8, "new": 2}, "later": 3}}
        assert differences(tmp_path, now) == []
        now["config"]["model"]["dim"] = 16
        assert differences(tmp_path, now) == ["model.dim: 8 -> 16"]

    def test_options_of_a_task_are_told_also_where_one_came_or_went(self, tmp_path):
        (tmp_path / "meta.json").write_text(json.dumps({**self.meta, "config": {"options": {"data": "a"}}}))
        now = {**self.meta, "config": {"options": {"data": "a", "flip": True}}}
        assert differences(tmp_path, now) == ['options: {"data": "a"} -> {"data": "a", "flip": true}']

    def test_the_micro_batch_that_was_found_is_told_and_not_that_it_was_looked_for(self, tmp_path):
        given = {**self.meta, "micro_batch": 8, "config": {"micro_batch": "auto"}}
        (tmp_path / "meta.json").write_text(json.dumps(given))
        assert differences(tmp_path, {**given, "micro_batch": 16}) == ["micro_batch: 8 -> 16"]

    def test_a_checkpoint_without_it_is_fine(self, tmp_path):
        assert differences(tmp_path, self.meta) == []

    @pytest.mark.parametrize("text", ["", "[]", "3", '{"step": 3}', '{"config": 1}'])
    def test_one_that_is_none_is_fine(self, tmp_path, text):
        (tmp_path / "meta.json").write_text(text)
        assert differences(tmp_path, self.meta) == []

    @pytest.mark.parametrize(("strategy", "key"), [("deepspeed", "zero_stage"), ("hsdp", "replicas")])
    def test_what_one_strategy_alone_reads_is_a_change_of_that_one_alone(self, tmp_path, strategy, key):
        for name, changes in ((strategy, [f"{key}: 2 -> 4"]), ("fsdp", [])):
            before, now = ({"strategy": name, "config": {key: value}} for value in (2, 4))
            (tmp_path / "meta.json").write_text(json.dumps(before))
            assert differences(tmp_path, now) == changes

    def test_what_follows_from_another_key_is_not_said_twice(self, tmp_path):
        (tmp_path / "meta.json").write_text(json.dumps({**self.meta, "world_size": 2, "mesh": "dp=2"}))
        assert differences(tmp_path, {**self.meta, "world_size": 4, "mesh": "dp=4"}) == ["world_size: 2 -> 4"]


class TestGPT:
    @pytest.mark.parametrize(
        "shape",
        [
            TINY,
            ModelConfig(layers=3, dim=10, heads=1),
            ModelConfig(layers=2, dim=48, heads=4, kv_heads=2, mlp="swiglu", qk_norm=True),
            ModelConfig(layers=1, dim=32, heads=4, kv_heads=1, tied=True),
        ],
        ids=str,
    )
    def test_its_size_is_known_without_torch(self, shape):
        assert shape.parameters == sum(each.numel() for each in GPT(shape, 16).parameters())

    @pytest.mark.parametrize(
        "changes", [{}, {"kv_heads": 1, "mlp": "swiglu"}, {"tied": True, "qk_norm": True}], ids=str
    )
    def test_a_token_is_predicted_from_those_before_it_alone(self, changes):
        torch.manual_seed(0)
        model = GPT(ModelConfig(layers=2, dim=32, heads=2, **changes), 16)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        inputs, changed = torch.randint(256, (1, 16)), None
        changed = inputs.clone()
        changed[0, 10] += 1
        logits: list[torch.Tensor] = []
        model.head.register_forward_hook(lambda *given: logits.append(given[2]))
        for tokens in (inputs, changed % 256):
            model(tokens)
        assert torch.equal(logits[0][:, :10], logits[1][:, :10])
        assert not torch.equal(logits[0][:, 10:], logits[1][:, 10:])

    def test_positions_matter(self):
        torch.manual_seed(0)
        model = GPT(TINY, 16)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        logits: list[torch.Tensor] = []
        model.head.register_forward_hook(lambda *given: logits.append(given[2]))
        for order in ([1, 2, 3], [2, 1, 3]):
            model(torch.tensor([order]))
        assert not torch.allclose(logits[0][:, 2], logits[1][:, 2])

    def test_decay_is_for_matrices_only(self):
        model = GPT(TINY, 16)
        (one,) = optim.make(model, Layout(), TrainConfig(weight_decay=0.3)).each
        decayed, plain = sorted(one.param_groups, key=lambda group: -group["weight_decay"])
        assert {p.ndim for p in decayed["params"]} == {2}
        assert {p.ndim for p in plain["params"]} == {1}
        assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
        assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))

    def test_muon_has_the_matrices_of_blocks_alone(self):
        model = GPT(TINY, 16)
        layout = Layout(blocks=("blocks.0", "blocks.1"))
        made = optim.make(model, layout, TrainConfig(optimizer="muon"))
        kinds = {
            type(one).__name__: {id(p) for group in one.param_groups for p in group["params"]} for one in made.each
        }
        matrices = {id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
        assert kinds["Muon"] == matrices
        assert kinds["AdamW"] == {id(p) for p in model.parameters()} - matrices
        sizes = [
            sum(4 * p.numel() for p in model.parameters() if (id(p) in matrices) is muon) for muon in (True, False)
        ]
        assert made.state_bytes == made.held_bytes == sizes[0] + 2 * sizes[1]

    def test_a_skipped_step_changes_no_bit_and_none_waits_for_the_device(self):
        """Of matrices by Muon and of the rest by AdamW, in the first step too, and whatever the gradients were."""

        class NoWait(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                assert func is not torch.ops.aten._local_scalar_dense.default, "a value was waited for"
                return func(*args, **kwargs or {})

        torch.manual_seed(0)
        model = GPT(TINY, 16)
        layout = Layout(blocks=("blocks.0", "blocks.1"))
        made = optim.make(model, layout, TrainConfig(optimizer="muon", weight_decay=0.1))
        alone = copy.deepcopy(model)
        (theirs,) = (one for one in optim.make(alone, layout, TrainConfig(optimizer="muon", weight_decay=0.1)).each[1:])
        names = [name for name, each in alone.named_parameters() if any(each is p for p in matrices(theirs))]
        go, skip = torch.tensor(0.0), torch.tensor(1.0)
        for skipped in (skip, go, skip, go):
            before = [each.clone() for each in model.parameters()]
            for one, other in zip(model.parameters(), alone.parameters(), strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad * 0.5
                one.grad[0] = one.grad[0] if skipped is go else torch.nan
            with NoWait():
                made.step(0.01, torch.tensor(0.5), skipped)
            if skipped is skip:
                assert all(map(torch.equal, before, model.parameters()))
                continue
            for group in theirs.param_groups:
                group["lr"] = 0.01
            theirs.step()
            changed = dict(model.named_parameters())
            assert all(torch.equal(changed[name], each) for name, each in alone.named_parameters() if name in names)
            assert not any(map(torch.equal, before, model.parameters()))


def matrices(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


class TestAverage:
    def test_it_follows_the_parameters_and_a_skipped_step_leaves_it(self):
        """Of step n the newest ones have a weight of 1 - min(decay, (1 + n) / (10 + n))."""
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        average = Average(model, 0.5)
        expected = 0.0
        for step, (value, skipped) in enumerate([(1.0, 0.0), (2.0, 0.0), (9.0, 1.0), *[(4.0, 0.0)] * 12], 1):
            with torch.no_grad():
                model.weight.fill_(value)
            average.update(step, torch.tensor(skipped))
            weight = (1 - min(0.5, (1 + step) / (10 + step))) * (1 - skipped)
            expected += weight * (value - expected)
            assert average.state_dict()["weight"].item() == pytest.approx(expected)
        with average.in_place():
            assert model.weight.item() == pytest.approx(expected)
        assert model.weight.item() == 4.0


class TestLossScale:
    """Of one rank; that all have the same is seen in test_products.py."""

    def begun(self, *weights: float | None, loaded: float = 0.0) -> float:
        place: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
        scale = LossScale(place)
        scale.load_state_dict({**scale.state_dict(), "value": torch.tensor(loaded)})
        for weight in weights:
            scale.begin(weight)
        return scale.up(torch.tensor(1.0)).item()

    def test_it_begins_once_with_what_fits_the_sum_unless_it_was_loaded(self):
        assert self.begun(48.0) == self.begun(64.0) == self.begun(48.0, 1.0) == HIGHEST / 64
        assert self.begun(48.0, loaded=8.0) == 8.0

    @pytest.mark.parametrize("weight", [None, 0.0, float("nan"), float("inf")])
    def test_a_rank_without_a_loss_and_a_bad_batch_decide_nothing(self, weight):
        assert self.begun(weight) == HIGHEST


class Remembers(nn.Module):
    """Keeps what it saw in each of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        for name, value in (("mean", torch.zeros(())), ("cache", torch.zeros(0))):
            self.register_buffer(name, value)
        self.register_buffer("codes", torch.ones(4, dtype=torch.uint8))
        self.register_buffer("wide", torch.ones(1).expand(3))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + given.detach().mean()
        self.cache = given.new_zeros(len(given), len(self.cache) + 1)
        return self.norm(given)


class TestBuffers:
    """On one rank."""

    place: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1, copies=1, tells=True)

    def test_a_skipped_step_leaves_statistics_as_they_were_and_another_does_not(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Remembers())
        policy = precision.POLICIES["fp32"]
        strategy: Any = SimpleNamespace(
            place=self.place, policy=policy, forward_pass=lambda model, reduce: nullcontext()
        )
        task: Any = SimpleNamespace(loss=lambda model, batch: Loss(model(batch["x"]).pow(3).sum(), 4))
        optimizers = optim.make(model, Layout(), TrainConfig())
        engine = Plain(task, model, strategy, optimizers, clip_norm=1.0, micro_batches=2, did=lambda: None)

        def step(*numbers: float) -> dict[str, torch.Tensor]:
            totals = engine.gradients([{"x": number * torch.randn(4, 4)} for number in numbers]).reduce(self.place)
            engine.update(0.1, totals)
            kept = ("weight", "bias", "0.running_mean", "norm.running_mean", "norm.running_var", "tracked", "mean")
            return {name: each.clone() for name, each in model.state_dict().items() if name.endswith(kept)}

        first, skipped, last = step(1.0, 2.0), step(1.0, math.nan), step(1.0, 3.0)
        assert all(torch.equal(each, skipped[name]) for name, each in first.items())
        assert not any(torch.equal(each, last[name]) for name, each in first.items())
        assert last["1.norm.num_batches_tracked"] == 4
        assert all(each.isfinite().all() for each in last.values())

    def test_what_a_task_computes_in_fp32_has_its_gradient_in_fp32(self):
        """Torch's autocast would make the products of its backward pass of 16 bits, were it on there."""
        torch.manual_seed(0)
        model, weights, inputs = nn.Linear(64, 64), torch.randn(64, 64), torch.randn(64, 64)

        def loss(model: nn.Module, batch: torch.Tensor) -> Loss:
            with torch.autocast("cpu", enabled=False):
                return Loss((model(batch) * weights).sum(), 1)

        strategy: Any = Single(self.place, precision.POLICIES["bf16"])
        task, optimizers = SimpleNamespace(loss=loss), optim.make(model, Layout(), TrainConfig())
        given: Any = (task, model, strategy, optimizers)
        Plain(*given, clip_norm=1.0, micro_batches=1, did=lambda: None).gradients([inputs])  # type: ignore[list-item]
        assert torch.equal(model.weight.grad, weights.t() @ inputs)

    def test_compiled_it_has_its_gradient_in_fp32_too(self, monkeypatch):
        """A backward pass is compiled with the forward one, and torch takes the autocast of that for its own."""
        from torch._functorch import config

        class Router(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                with torch.autocast("cpu", enabled=False):
                    return super().forward(inputs)

        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        torch.manual_seed(0)
        model, weights, inputs = Router(64, 64, bias=False), torch.randn(64, 64), torch.randn(64, 64)
        with config.patch(backward_pass_autocast="same_as_forward"):  # torch's own default
            memory.compile_blocks(model, Layout())
            with torch.autocast("cpu", torch.bfloat16):
                total = (model(inputs) * weights).sum()
            total.backward()
        assert torch.equal(model.weight.grad, weights.t() @ inputs)

    def test_what_is_computed_again_is_compiled_so_in_the_thread_that_does_it(self, monkeypatch):
        """A GPU's backward pass has a thread of its own, which knows nothing of what another one has set."""
        from torch._functorch import config

        model, seen = nn.Sequential(nn.Linear(4, 4)), list[str]()
        memory.save(model, Layout(("0",)), "full", compiled=True)
        total = model(torch.ones(1, 4)).pow(2).sum()
        thread = Thread(target=lambda: (total.backward(), seen.append(config.backward_pass_autocast)))
        thread.start()
        thread.join()
        assert seen == ["off"]

    def test_stages_go_back_through_it_in_fp32_too(self, monkeypatch):
        from mgpu_train.engines.pipelined import Stage  # 0.3 s

        seen = list[tuple[int, bool]]()
        monkeypatch.setattr(
            Stage.__base__,
            "backward_one_chunk",
            lambda _, number, *, last_backward: seen.append((number, torch.is_autocast_enabled("cpu"))),
        )
        stage = Stage.__new__(Stage)
        stage.device = torch.device("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            stage.backward_one_chunk(3, last_backward=True)
        assert seen == [(3, False)]

    def test_the_pass_in_which_stages_meet_is_not_counted(self):
        from mgpu_train.engines.pipelined import Pipelined  # 0.3 s

        def passes(batches: list[Any]) -> Sums:
            for each in batches:
                model(each)
            return Sums()

        engine: Any = Pipelined.__new__(Pipelined)
        model = engine.model = nn.BatchNorm1d(4)
        place = SimpleNamespace(stage=0)
        engine.strategy, engine.optimizers = SimpleNamespace(place=place), SimpleNamespace(zero_grad=lambda: None)
        engine._buffers, engine._scale, engine._met = Buffers(model), None, False
        engine._gradients, engine._agreed = passes, lambda sums: sums
        for step in (1, 2):
            engine.gradients([torch.randn(4, 4)])
            assert model.num_batches_tracked == step


def test_nothing_is_drawn_for_the_pass_in_which_stages_meet():
    """An attempt begins with it at any step: what is trained after a resume does not depend on that."""
    from mgpu_train.engines.pipelined import Pipelined  # 0.3 s

    drawn = list[tuple[float, ...]]()

    def passes(_batches: list[Any]) -> Sums:
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return Sums()

    for met in (False, True):
        engine: Any = Pipelined.__new__(Pipelined)
        engine.strategy = SimpleNamespace(place=SimpleNamespace(stage=1))
        engine.optimizers = SimpleNamespace(zero_grad=lambda: None)
        engine._buffers, engine._scale, engine._met = Buffers(nn.Identity()), None, met
        engine._gradients, engine._agreed = passes, lambda sums: sums
        set_streams(seed=1, step=7, copy=0)
        engine.gradients([])
    assert len(drawn) == 3
    assert drawn[1] == drawn[2]


def test_stages_draw_their_own_and_a_task_draws_the_same_on_the_first_and_the_last():
    """A diffusion's noise is in its model's input and in its loss, whatever the stages drop in between."""
    from mgpu_train.engines.pipelined import Pipelined  # 0.3 s

    told = list[torch.Tensor]()

    class Noise:
        def loss(self, model: Any, batch: torch.Tensor) -> Loss:
            noise = torch.rand(4)
            told.append(noise)
            return Loss((model(batch + noise) - noise).sum(), 1)

    def stage(number: int) -> Any:
        made: Any = Pipelined.__new__(Pipelined)
        made.strategy = SimpleNamespace(place=SimpleNamespace(stage=number, device=torch.device("cpu")))
        made.task, made.model, made._scale, made._did = Noise(), nn.Identity(), None, lambda: None
        made._batches, made._losses = [torch.zeros(4), torch.zeros(4)], {}
        torch.manual_seed(5)  # as each step does on all ranks of a copy
        made._part_streams(torch.initial_seed())
        return made

    first = stage(0)
    noise = [first._inputs(number)[0] for number in (0, 1)]
    dropped = [torch.rand(4)]
    last = stage(1)
    for number in (0, 1):
        dropped.append(torch.rand(4))
        last._loss_of(dropped[-1], torch.tensor(number))
    assert torch.equal(torch.stack(told[2:]), torch.stack(noise))
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(dropped[0], dropped[1])


class TestFit:
    """Of `micro_batch: auto`, on one rank."""

    def fit(self, shards: bool, error: Exception | None = None, context: int = 1) -> Fit:
        def loss(model, batch):
            if len(batch) > 4:
                raise error or torch.OutOfMemoryError("CUDA out of memory")
            return SimpleNamespace(total=model(batch).sum())

        alone = {"rank": 0, "world_size": 1, "context": context, "gather": lambda said: [said], "barrier": lambda: None}
        place = SimpleNamespace(device=torch.device("cpu"), **alone)
        strategy = SimpleNamespace(place=place, shards=shards, forward_pass=lambda model, reduce: nullcontext())
        given: Any = (SimpleNamespace(loss=loss), nn.Linear(2, 1), strategy)
        return Fit(*given, lambda ranges: (torch.ones(len(each), 2) for each in ranges), lambda: None, compiled=False)

    @pytest.mark.parametrize("error", [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                     "tried to allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)"),
        MemoryError("std::bad_alloc"),
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ], ids=lambda error: str(error)[:40])  # fmt: skip
    def test_it_goes_back_a_size_where_memory_runs_out(self, error):
        assert self.fit(shards=False, error=error).largest(16, 0) == 4

    @pytest.mark.parametrize("error", [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(errno.EIO, os.strerror(errno.EIO)),
        RuntimeError("DataLoader worker is killed by signal: Bus error. Workers are out of shared memory."),
    ])  # fmt: skip
    def test_another_error_is_not_for_the_lack_of_memory(self, error):
        with pytest.raises(type(error)) as caught:
            self.fit(shards=False, error=error).largest(16, 0)
        assert caught.value is error

    @pytest.mark.parametrize(("shards", "context"), [(True, 1), (False, 2)])
    def test_shards_and_shared_sequences_do_not_survive_that_on_one_rank_either(self, shards, context):
        """FSDP leaves what it had gathered for a backward pass that never came; others wait for keys and values."""
        with pytest.raises(TrainError, match=r"8 samples lack memory on rank 0.*Say `micro_batch: 4`"):
            self.fit(shards=shards, context=context).largest(16, 0)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_strategys_own_engine_takes_no_pipeline_that_it_does_not_know(pipeline):
    """Another one in its place would train in another way, without a word."""
    strategy: Any = SimpleNamespace(place=SimpleNamespace(pipeline=pipeline), engine="mgpu_train.engines.plain:Plain")
    if pipeline == 1:
        assert engines.of(strategy) is Plain
        return
    with pytest.raises(TrainError, match=r"plain:Plain is no class that is derived from .*\.Pipelined"):
        engines.of(strategy)
    strategy.engine = None
    assert engines.of(strategy).__name__ == "Pipelined"


class Numbered:
    """Samples that are their numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, samples: Sequence[int], _seeds: Sequence[int]) -> Batch:
        return {"x": torch.tensor(samples)}


class TestValidation:
    """On two ranks, of three batches of eight at most."""

    def validated(self, monkeypatch: Any, samples: int, micro: int | None, **given: Any) -> list[list[list[int]]]:
        """The samples of each pass, by rank."""
        monkeypatch.setattr(loop, "exchange", lambda _place, seen, _wishes: seen)
        pipeline, parts = given.pop("pipeline", 1), list[list[list[int]]]()

        def evaluate(batches: Iterable[Batch | None]) -> Any:
            parts.append([[] if batch is None else batch["x"].tolist() for batch in batches])
            return SimpleNamespace(means=lambda _: {}, vector=torch.zeros(0))

        for rank in (0, 1):
            trainer: Any = Trainer.__new__(Trainer)
            trainer.config = TrainConfig(global_batch=8, validate_batches=3, **given)
            trainer.slices = Slices(8, micro, rank, 2)
            trainer.place = SimpleNamespace(copy=rank, dp_size=2, pipeline=pipeline)
            trainer.loader, trainer.task = Loader(torch.device("cpu"), 1), SimpleNamespace(derived=lambda _: {})
            trainer.validation_data = Numbered(samples)
            trainer.engine = SimpleNamespace(evaluate=evaluate)
            trainer._means(stoppable=False)
            trainer.loader.close()
        assert all(part[0] for part in parts)
        assert len({len(part) for part in parts}) == 1, "ranks wait for each other in each pass"
        return parts

    @pytest.mark.parametrize("micro", [None, 1, 3])
    @pytest.mark.parametrize(("samples", "times"), [(20, 1), (9, 1), (2, 1), (24, 1), (100, 1), (1, 2)])
    def test_no_sample_counts_twice_but_where_there_is_less_than_one_a_rank(self, monkeypatch, samples, times, micro):
        seen = [each for part in self.validated(monkeypatch, samples, micro) for some in part for each in some]
        assert len(seen) == min(24, times * samples)
        assert len(set(seen)) == len(seen) // times

    @pytest.mark.parametrize("given", [{"compile": True}, {"pipeline": 2}])
    @pytest.mark.parametrize(("samples", "made"), [(20, 24), (9, 16), (8, 8), (2, 8), (100, 24)])
    def test_where_passes_are_of_one_size_each_sample_counts_and_few_do_twice(self, monkeypatch, samples, made, given):
        """Of two sizes, training is compiled for sizes that vary, and not as after a resume without a validation."""
        passes = [some for part in self.validated(monkeypatch, samples, 2, **given) for some in part]
        assert {len(some) for some in passes} == {2}
        seen = [each for some in passes for each in some]
        assert (len(seen), len(set(seen))) == (made, min(samples, made))


class TestPatience:
    def test_training_ends_after_so_many_in_a_row_that_are_no_better(self):
        watch = Patience(EarlyStopping(patience=2, min_delta=0.1))
        over = [watch.take({"loss": loss}) and watch.over for loss in (3.0, 2.0, 1.95, 1.8, 1.75, 1.74)]
        assert over == [False, False, False, False, False, True]

    def test_more_is_better_where_it_says_so(self):
        watch = Patience(EarlyStopping(metric="accuracy", mode="max", patience=1))
        assert [watch.take({"accuracy": each}) and watch.over for each in (0.1, 0.2, 0.2)] == [False, False, True]

    def test_it_goes_on_where_it_was(self):
        watch, other = (Patience(EarlyStopping(patience=2)) for _ in range(2))
        for loss in (1.0, 2.0):
            watch.take({"loss": loss})
        other.load_state_dict(watch.state_dict())
        other.take({"loss": 1.5})
        assert other.over

    def test_a_value_that_no_validation_has_is_no_value(self):
        assert not Patience(EarlyStopping(metric="acuracy")).take({"accuracy": 1.0})


class TestReadJob:
    def test_a_job(self, tmp_path, monkeypatch, minimal_job):
        path = tmp_path / "job.json"
        path.write_text(json.dumps(minimal_job))
        monkeypatch.setenv("MGPU_JOB", str(path))
        assert read_job() == Job.model_validate(minimal_job)

    def test_no_variable(self, monkeypatch):
        monkeypatch.delenv("MGPU_JOB", raising=False)
        with pytest.raises(TrainError, match=r"MGPU_JOB is not set.*usage: MGPU_JOB=job.json"):
            read_job()

    def test_no_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MGPU_JOB", str(tmp_path / "absent"))
        with pytest.raises(TrainError, match="No such file"):
            read_job()

    def test_all_mistakes_in_one_line(self, tmp_path, monkeypatch, minimal_job):
        path = tmp_path / "job.json"
        path.write_text(json.dumps({**minimal_job, "train": {"lr": -1, "setps": 3}}))
        monkeypatch.setenv("MGPU_JOB", str(path))
        with pytest.raises(TrainError, match=r"train.lr: .*; train.setps: ") as caught:
            read_job()
        assert "\n" not in str(caught.value)


@pytest.fixture
def minimal_job() -> dict:
    return {
        "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 29500, "train": {},
    }  # fmt: skip
