"""Task `lm`: a GPT on the bytes of text files, or on tokens of files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from mgpu_train.config import LmOptions
from mgpu_train.data.text import Text, open_split
from mgpu_train.data.tokens import Tokens, open_tokens
from mgpu_train.errors import TrainError
from mgpu_train.models.context import Context
from mgpu_train.models.cross_entropy import CrossEntropy
from mgpu_train.models.gpt import GPT
from mgpu_train.tasks import entry
from mgpu_train.tasks.base import Batch, Data, Layout, Loss, Split, Task


class LM(Task):
    """Predicts the next token; without a tokenizer each byte is one."""

    Options = LmOptions
    unit = "tokens"
    options: LmOptions

    def __init__(self, options: LmOptions) -> None:
        super().__init__(options)
        self._cross_entropy = CrossEntropy()
        self._context: Context | None = None

    def data(self, split: Split) -> Data:
        """Sequences of the training or of the validation part."""
        return Sequences(self._parts[split == "validation"], self.options.seq_len)

    def model(self) -> GPT:
        """A GPT of the shape that the run file gives."""
        return GPT(self.options.model, self.options.seq_len)

    def initialise(self, model: nn.Module) -> None:
        """Weights by their fan-in."""
        assert isinstance(model, GPT)  # noqa: S101
        model.initialise()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy of every next token, in nat; of ranks that share sequences, of this one's."""
        tokens = batch["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._context is not None:
            inputs, targets = self._context.part(inputs), self._context.part(targets)
        return Loss(self._cross_entropy(model(inputs), targets), targets.numel())

    def share_sequences(self, model: nn.Module, context: Context) -> None:
        """Each rank of a group predicts its part of the tokens."""
        if why := entry.LM.refuse_context(self.options, context.size):
            raise TrainError(f"`train.context_parallel`: {why}")
        assert isinstance(model, GPT)  # noqa: S101
        self._context = context
        model.share(context)

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """And in bits per byte, where it is known how many bytes a token of the validation part has in the mean: the
        measure that models of different tokenizers have in common."""
        loss, per_byte = self.loss(model, batch), self._parts[1].per_byte
        values = {} if per_byte is None else {"bits_per_byte": loss.total * (per_byte / math.log(2))}
        return Loss(loss.total, loss.weight, values)

    def compile(self) -> None:
        """The cross-entropy."""
        self._cross_entropy.compile()

    def flops(self) -> float:
        """Of a token, forward and backward."""
        return self.options.model.flops(self.options.seq_len)

    def layout(self, model: nn.Module) -> Layout:
        """The transformer's blocks, and how ranks share them."""
        config = self.options.model
        blocks = tuple(f"blocks.{number}" for number in range(config.layers))
        shared = {
            "columns": ["attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate"],
            "rows": ["attention.out", "mlp.down"],
            "heads": ["attention.norm_q", "attention.norm_k"] if config.qk_norm else [],
        }
        tensor = {f"{block}.{name}": how for block in blocks for how, names in shared.items() for name in names}
        return Layout(blocks, first=("embed",), last=("norm", "head"), tensor=tensor)

    def facts(self) -> Mapping[str, float]:
        """Of bytes: what a model reaches that counts them, and pairs of them, in the validation text, in nat/byte. Of
        tokens: how many bytes one stands for."""
        part = self._parts[1]
        if isinstance(part, Tokens):
            return {"bytes_per_token": round(1 / part.per_byte, 4)} if part.per_byte else {}
        unigram, bigram = part.entropies()
        return {"unigram_entropy": round(unigram, 4), "bigram_entropy": round(bigram, 4)}

    @cached_property
    def _parts(self) -> tuple[Text, Text] | tuple[Tokens, Tokens]:
        options = self.options
        if options.tokens is None:
            return open_split(options.text, options.seq_len)
        assert options.model.vocabulary is not None  # noqa: S101 - the options see to it
        return open_tokens(options.tokens, options.seq_len, options.model.vocabulary)


@dataclass(frozen=True)
class Sequences:
    """A part, cut into sequences."""

    part: Text | Tokens
    seq_len: int

    @property
    def fingerprint(self) -> str:
        """The part's."""
        return self.part.fingerprint

    def __len__(self) -> int:
        """How many there are."""
        return self.part.samples(self.seq_len)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """Sequences with the token that follows each: int64, shape (samples, seq_len + 1). Nothing is drawn."""
        return {"tokens": self.part.tensor(samples, self.seq_len)}
