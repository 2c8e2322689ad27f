"""Task `lm`: a GPT on the bytes of text files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.config import LmOptions
from mgpu_train.data.text import Text, open_split
from mgpu_train.models.gpt import GPT
from mgpu_train.tasks.base import Batch, Data, Layout, Loss, Split, Task

BYTES = 256


class ByteLM(Task):
    """Predicts the next byte of text files."""

    Options = LmOptions
    unit = "tokens"  # bytes
    options: LmOptions

    def data(self, split: Split) -> Data:
        """Sequences of the training or of the validation text."""
        return Sequences(self._texts[split == "validation"], self.options.seq_len)

    def model(self) -> GPT:
        """A GPT of the shape that the run file gives."""
        return GPT(self.options.model, BYTES, self.options.seq_len)

    def initialise(self, model: nn.Module) -> None:
        """Weights by their fan-in."""
        assert isinstance(model, GPT)  # noqa: S101
        model.initialise()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy of every next byte, in nat."""
        tokens = batch["bytes"]
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        return Loss(F.cross_entropy(logits.reshape(-1, BYTES), targets.reshape(-1), reduction="sum"), targets.numel())

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
        """What a model reaches that counts bytes, and pairs of them, in the validation text: nat/byte."""
        unigram, bigram = self._texts[1].entropies()
        return {"unigram_entropy": round(unigram, 4), "bigram_entropy": round(bigram, 4)}

    @cached_property
    def _texts(self) -> tuple[Text, Text]:
        return open_split(self.options.text, self.options.seq_len)


@dataclass(frozen=True)
class Sequences:
    """A text, cut into sequences."""

    text: Text
    seq_len: int

    @property
    def fingerprint(self) -> str:
        """The text's."""
        return self.text.fingerprint

    def __len__(self) -> int:
        """How many there are."""
        return self.text.samples(self.seq_len)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """Sequences with the byte that follows each: int64, shape (samples, seq_len + 1)."""
        return {"bytes": self.text.tensor(samples, self.seq_len)}
