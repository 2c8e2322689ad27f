"""Sequences of which each rank of a group has a part: what it has of them, and attention over all of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from mgpu_train.config import ModelConfig
from mgpu_train.data.order import Chunks
from mgpu_train.errors import TrainError
from mgpu_train.models import context_hf
from mgpu_train.models.context import Context, causal_part
from mgpu_train.models.gpt import GPT
from mgpu_train.parallel import Place
from mgpu_train.strategies import context as strategy
from torch import nn
from torch.nn import functional

SIZES = [1, 2, 3, 5]
TINY: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48, "max_position_embeddings": 64, "num_local_experts": 2, "head_dim": 8, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip

LONG = {  # two sets of angles, of short and of long sequences
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12, "factor": 2.0,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip


def ranks(size: int) -> list[Context]:
    return [Context(rank, size, None) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_each_token_is_one_ranks_and_all_have_as_many_before_theirs(size):
    tokens = torch.arange(4 * 2 * size)
    parts = [each.part(tokens, 0) for each in ranks(size)]
    assert sorted(chain.from_iterable(part.tolist() for part in parts)) == tokens.tolist()
    assert len({len(part) for part in parts}) == len({int(part.sum()) for part in parts}) == 1
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)


def test_a_part_is_of_the_dimension_that_is_named():
    whole = torch.arange(3 * 8 * 2).view(3, 8, 2)
    assert torch.equal(ranks(2)[1].part(whole), whole[:, [2, 3, 4, 5]])
    assert torch.equal(ranks(2)[0].part(whole.transpose(1, 2), 2), whole[:, [0, 1, 6, 7]].transpose(1, 2))


def test_sequences_that_cannot_be_parted_evenly_are_refused():
    with pytest.raises(TrainError, match=r"3 ranks share sequences of a multiple of 6 tokens, and 16 is none"):
        ranks(3)[0].part(torch.zeros(2, 16))
    assert Chunks(0, 3).refuse(18) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [1, 2])
def test_parts_of_causal_attention_are_those_of_the_whole(size, shared):
    """Forward, and the gradients of keys and values, which are sums over ranks."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, 6 * size, 8, requires_grad=True) for heads in (2 * shared, 2, 2)]
    q, k, v = given
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), given)
    total = torch.zeros(())
    for each in ranks(size):
        found = causal_part(each.part(q, 2), k, v, each, enable_gqa=True)
        torch.testing.assert_close(found, each.part(expected, 2))
        total = total + (found * each.part(weights, 2)).sum()
    torch.testing.assert_close(torch.autograd.grad(total, given), wanted)


@pytest.mark.parametrize(
    ("tensor", "shared", "pipeline", "mine"),
    [
        (1, 2, 1, {0: [0, 1], 5: [4, 5]}),
        (2, 2, 1, {0: [0, 2], 3: [1, 3], 6: [4, 6]}),
        (1, 2, 2, {1: [0, 1], 2: [2, 3], 7: [6, 7]}),
        (2, 2, 2, {1: [1, 3], 6: [4, 6]}),
        (1, 8, 1, {3: [0, 1, 2, 3, 4, 5, 6, 7]}),
    ],
)
def test_ranks_of_a_group_have_the_same_samples_layers_and_blocks(monkeypatch, tensor, shared, pipeline, mine):
    groups: list[list[int]] = []
    told: dict[int, Context] = {}

    class Shares:
        def share_sequences(self, _model: nn.Module, given: Context) -> None:
            told[len(told)] = given

    def group(every: list[list[int]]) -> tuple[object, None]:
        groups[:] = every
        return object(), None

    monkeypatch.setattr(torch.distributed, "new_subgroups_by_enumeration", group)
    nothing: Any = None
    whole = [Place(rank, rank, 8, torch.device("cpu"), nothing, nothing) for rank in range(8)]
    places = [replace(each, tensor=tensor, context=shared, pipeline=pipeline) for each in whole]
    for place in places:
        task: Any = Shares()
        strategy.share(nn.Identity(), task, place)
    assert sorted(chain.from_iterable(groups)) == list(range(8))
    for ranks_of in groups:
        alike = {(places[rank].dp_rank, places[rank].stage, rank % tensor) for rank in ranks_of}
        assert len(alike) == 1
        assert [told[rank].rank for rank in ranks_of] == list(range(shared))
    for rank, expected in mine.items():
        assert expected in groups
        assert rank in expected
    assert {place.dp_rank for place in places} == set(range(8 // (tensor * shared * pipeline)))
    assert len({place.copy for place in places}) == 8 // (tensor * pipeline), "each copy draws by itself"


def test_a_task_that_does_not_say_how_is_refused():
    nothing: Any = None
    place = Place(0, 0, 2, torch.device("cpu"), nothing, nothing, context=2)
    with pytest.raises(TrainError, match=r"`train.context_parallel`: object does not say how"):
        strategy.share(nn.Identity(), nothing or object(), place)  # type: ignore[arg-type]


class Threads(Context):
    """Ranks that are threads of this process; `group` is where they meet, and what they lay down there."""

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        meeting, there = self.group
        there[self.rank] = own
        meeting.wait()
        whole = torch.stack([there[rank] for rank in range(self.size)])
        meeting.wait()
        return whole


def together(size: int, run: Callable[[Context], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank of a group makes, without gradients."""
    group = threading.Barrier(size, timeout=60), dict[int, torch.Tensor]()

    def each(rank: int) -> torch.Tensor:
        with torch.no_grad():
            return run(Threads(rank, size, group))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(each, range(size)))


def test_attention_in_both_directions_is_that_of_the_whole():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 12, 4) for _ in range(3))
    expected = functional.scaled_dot_product_attention(q, k, v)
    found = together(3, lambda each: each.attention(*(each.part(part, 2) for part in (q, k, v))))
    for rank, part in enumerate(found):
        torch.testing.assert_close(part, ranks(3)[rank].part(expected, 2))


def test_what_is_computed_in_16_bits_is_gathered_in_them_though_turned_queries_and_keys_have_32(monkeypatch):
    """As of transformers' models under autocast; and a mask without numbers would leave that to them."""
    gathered: list[torch.dtype] = []
    asked: list[torch.dtype] = []
    attention = functional.scaled_dot_product_attention

    class Alone(Context):
        def _gathered(self, own: torch.Tensor) -> torch.Tensor:
            gathered.append(own.dtype)
            return own.unsqueeze(0)

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        asked.extend((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", look)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        found = Alone(0, 1, None).attention(q, k, v.bfloat16(), is_causal=True)
    assert {*gathered, *asked, found.dtype} == {torch.bfloat16}
    torch.testing.assert_close(found.float(), attention(q, k, v, is_causal=True), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "mlp": "swiglu", "qk_norm": True}], ids=str)
def test_a_model_of_task_lm_says_of_its_tokens_what_it_says_of_the_whole(changes):
    torch.manual_seed(0)
    whole = GPT(ModelConfig(layers=2, dim=32, heads=2, **changes), 32)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(256, (2, 24))  # fewer than there may be
    with torch.no_grad():
        expected = whole(tokens)

    def run(each: Context) -> torch.Tensor:
        model = copy.deepcopy(whole)
        model.share(each)
        return model(each.part(tokens))

    for rank, found in enumerate(together(3, run)):
        torch.testing.assert_close(found, ranks(3)[rank].part(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", context_hf.SHARED)
def test_models_of_transformers_whose_sequences_are_shared_say_what_they_say_of_the_whole(name):
    """Also those that are given other positions than they would count themselves."""
    config = transformers.AutoConfig.for_model(name, **TINY)
    torch.manual_seed(0)
    kind = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    whole = kind.from_config(config).eval()
    tokens, positions = torch.randint(64, (2, 16)), torch.arange(16).unsqueeze(0)
    with torch.no_grad():
        expected = whole(input_ids=tokens).logits
        assert not torch.allclose(expected, whole(input_ids=tokens.roll(1, 1)).logits.roll(-1, 1)), "order matters"

    def run(each: Context) -> torch.Tensor:
        model = copy.deepcopy(whole)
        context_hf.share(model, each, 16)
        return model(input_ids=each.part(tokens), position_ids=each.part(positions)).logits

    for rank, found in enumerate(together(2, run)):
        torch.testing.assert_close(found, ranks(2)[rank].part(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("roberta", {}, "ranks share the sequences of models bert, gpt2, .*, and this is roberta"),
        ("mistral", {"sliding_window": 8}, r"sees 8 tokens back \(`sliding_window`\), and shared is what sees all 16"),
        ("llama", {"rope_parameters": LONG}, r"a sequence of more than 12 tokens is \(`rope_type: longrope`\)"),
    ],
)
def test_a_model_that_is_not_known_to_be_right_is_refused(name, more, message):
    config = transformers.AutoConfig.for_model(name, **TINY, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(TrainError, match=message):
        context_hf.share(model, ranks(2)[0], 16)


def test_angles_that_depend_on_the_length_are_shared_where_all_ranks_have_the_same():
    config = transformers.AutoConfig.for_model("llama", **TINY, rope_parameters=LONG)
    context_hf.share(transformers.AutoModelForCausalLM.from_config(config), ranks(2)[0], 12)
