"""Task `hf`: causal and masked language models and classifiers of transformers, whole or by adapters.

In shapes, B is samples, L tokens of each, V the vocabulary.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mgpu_train import entries
from mgpu_train.data.documents import Document, Keys, Tokens, encode, read, split
from mgpu_train.errors import TrainError
from mgpu_train.models.adapters import BASE, is_lora
from mgpu_train.models.context import Context
from mgpu_train.models.cross_entropy import CrossEntropy
from mgpu_train.tasks.base import Batch, Data, Layout, Loss, Split, Task
from mgpu_train.tasks.entry import HF
from mgpu_train.tasks.hf_config import HfOptions, on_hub

try:
    import transformers

    from mgpu_train.models import context_hf, pretrained
except ImportError as error:
    raise ImportError(f"task hf needs more packages, `pip install 'mgpu-train[hf]'`: {error}") from error

log = logging.getLogger("mgpu_train")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else it is told of at each fork
_LEFT_OUT = -100  # torch's label of what counts for nothing
_CLASSES = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "classifier": transformers.AutoModelForSequenceClassification,
}


class HuggingFace(Task):
    """A model of transformers."""

    Options = HfOptions
    options: HfOptions

    def __init__(self, options: HfOptions) -> None:
        super().__init__(options)
        self._cross_entropy = CrossEntropy(_LEFT_OUT)
        self._context: Context | None = None

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Tokens that are predicted, or texts that are labelled."""
        return "samples" if self.options.kind == "classifier" else "tokens"

    def data(self, split: Split) -> Data:
        """Samples of the texts."""
        config, kind = self._config, self.options.kind  # what is wrong with it is found before all texts are read
        tokens = self._splits[split == "validation"]
        length = self.options.seq_len + (kind == "causal")
        samples = Windows(tokens, length, self.options.seq_len) if self.options.packed else Rows(tokens, length)
        if not len(samples):
            raise TrainError(
                f"there is too little text for {split}: {len(tokens)} documents, {len(tokens.flat)} tokens, which are "
                f"no sample of {length}. Lower `train.options.seq_len`, or set `pack: false`"
            )
        base = "" if self.options.from_scratch else f"-{self._checksum:x}"
        fingerprint = f"{tokens.fingerprint}{base}"
        if kind == "causal":
            return Causal(samples, fingerprint)
        if kind == "classifier":
            return Labelled(samples, fingerprint, self._padding, tokens.labels)
        special = np.zeros(max(config.vocab_size, len(self._tokenizer)), bool)
        special[self._tokenizer.all_special_ids] = True
        mask = self._tokenizer.mask_token_id
        if mask is None:
            raise TrainError("`train.options.kind` masked: the tokenizer has no token that hides another (mask_token)")
        words = len(self._tokenizer)
        drawn = split == "train"
        return Masked(samples, fingerprint, self._padding, special, mask, words, self.options.mask_share, drawn)

    def model(self) -> nn.Module:
        """Of the folder's configuration, with adapters if there are to be some."""
        try:
            model = _CLASSES[self.options.kind].from_config(self._config, dtype=torch.float32)
        except ValueError as error:
            raise TrainError(
                f"transformers has no model of kind {self.options.kind} for {self.options.model}: "
                f"{str(error).partition(chr(10))[0]:.200}"
            ) from error
        if self.options.lora is not None:
            self._adapt(model)
            if self.options.lora.quantize_base is not None:
                self._quantise(model)
        return model

    def initialise(self, model: nn.Module) -> None:
        """What the folder has; the rest as transformers begins it, and adapters so that they change nothing yet."""
        made: Any = model
        parameters, found = dict(model.named_parameters()), set[str]()
        if not self.options.from_scratch:
            found = pretrained.fill(made, self._folder, self._needed(model))
            if new := [name for name in parameters if name not in found and not is_lora(name)]:
                self._tell_new(new, pretrained.frozen(model))
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        for name, value in (*parameters.items(), *model.named_buffers()):
            value._is_hf_initialized = name in found  # type: ignore[attr-defined] - then transformers leaves it
        made.initialize_weights()
        if self.options.lora is None:
            return
        model.get_buffer(BASE).fill_(self._checksum)
        for module in model.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", True)  # type: ignore[operator]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy in nat, of each token that is predicted or of each text."""
        given = {"attention_mask": batch["mask"]} if "mask" in batch else {}
        tokens, labels = batch["tokens"], batch["labels"]
        if self._context is not None:  # whose samples are of one length: nothing is padding
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
            tokens, labels, positions = (self._context.part(each) for each in (tokens, labels, positions))
            given = {"position_ids": positions}
        guess = model(input_ids=tokens, **given).logits
        total = self._cross_entropy(guess, labels)
        return Loss(total, (labels != _LEFT_OUT).sum(), {"accuracy": (guess.argmax(-1) == labels).sum()})

    def share_sequences(self, model: nn.Module, context: Context) -> None:
        """Each rank of a group predicts some tokens of its part."""
        if why := HF.refuse_context(self.options, context.size):
            raise TrainError(f"`train.context_parallel`: {why}")
        context_hf.share(model, context, self.options.seq_len)
        self._context = context

    def compile(self) -> None:
        """The cross-entropy."""
        self._cross_entropy.compile()

    def layout(self, model: nn.Module) -> Layout:
        """The model's layers."""
        name = pretrained.layers(model)
        layers = model.get_submodule(name)
        assert isinstance(layers, nn.ModuleList)  # noqa: S101
        return Layout(tuple(f"{name}.{number}" for number in range(len(layers))))

    def facts(self) -> Mapping[str, float]:
        """How many documents are trained on, and classes told apart."""
        classes = {"classes": len(self._classes)} if self.options.kind == "classifier" else {}
        return {"documents": len(self._splits[0]), **classes}

    # --- what it is made of -------------------------------------------------------------------------------------------

    @cached_property
    def _folder(self) -> Path:
        return pretrained.folder(self.options.model, self.options.revision, "model", hub=on_hub(self.options.model))

    @cached_property
    def _checksum(self) -> int:
        return pretrained.checksum(self._folder)

    @cached_property
    def _config(self) -> Any:
        """For training: without a cache of keys and values, and with as many labels as there are."""
        try:
            config = transformers.AutoConfig.from_pretrained(self._folder)
        except (OSError, ValueError) as error:
            raise TrainError(
                f"{self._folder} has no configuration of a model that transformers {transformers.__version__} knows: "
                f"{str(error).partition(chr(10))[0]:.200}"
            ) from error
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and self.options.seq_len > longest:
            raise TrainError(
                f"`train.options.seq_len` is {self.options.seq_len}, and the model's positions are {longest}"
            )
        if len(self._tokenizer) > config.vocab_size:
            raise TrainError(
                f"the tokenizer has {len(self._tokenizer)} tokens, and the model {config.vocab_size}: they are not of "
                "one model (`train.options.tokenizer`)"
            )
        config.use_cache = False
        if self.options.kind == "causal":
            config.pad_token_id = None  # padding comes last, where no token that counts sees it
        else:
            config.pad_token_id = self._padding
        if self.options.kind == "classifier":
            config.label2id = {str(label): number for number, label in enumerate(self._classes)}
            config.id2label = {number: name for name, number in config.label2id.items()}
        return config

    @cached_property
    def _tokenizer(self) -> Any:
        own = self.options.tokenizer
        folder = pretrained.folder(own, None, "tokenizer", hub=on_hub(own)) if own else self._folder
        try:
            return transformers.AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, ImportError) as error:
            raise TrainError(
                f"{folder} has no tokenizer that transformers can load ({str(error).partition(chr(10))[0]:.200}): name "
                "a folder that has one by `train.options.tokenizer`"
            ) from error

    @property
    def _padding(self) -> int:
        found = self._tokenizer.pad_token_id
        return found if found is not None else self._tokenizer.eos_token_id or 0

    @cached_property
    def _documents(self) -> tuple[list[Document], list[Document]]:
        options = self.options
        keys = Keys(options.text_key, options.prompt_key, options.label_key if options.kind == "classifier" else None)
        if options.validation is None:
            return split(read(options.data, keys))
        return read(options.data, keys), read(options.validation, keys)

    @cached_property
    def _classes(self) -> list[str | int]:
        """Labels in the order of the model's; raises TrainError: there is but one."""
        found = {each.label for part in self._documents for each in part if each.label is not None}
        numbers = [label for label in found if isinstance(label, int)]
        if len(found) < 2:
            raise TrainError(f"`train.options.label_key`: all texts have the same label, {next(iter(found))!r}")
        if len(numbers) == len(found) and min(numbers) >= 0:
            return list(range(max(numbers) + 1))
        return sorted(found, key=str)

    @cached_property
    def _splits(self) -> tuple[Tokens, Tokens]:
        return self._encoded(self._documents[0]), self._encoded(self._documents[1])

    def _encoded(self, documents: list[Document]) -> Tokens:
        causal, packed = self.options.kind == "causal", self.options.packed
        tokenizer, most = self._tokenizer, None if packed else self.options.seq_len + causal
        # what ends a text (as [SEP]) stays, where the model is to see it
        cut = {} if packed or causal else {"truncation": True, "max_length": most}

        def of(special: bool) -> Callable[[list[str]], Sequence[Sequence[int]]]:
            return lambda texts: tokenizer(texts, add_special_tokens=special, verbose=False, **cut)["input_ids"]

        end = tokenizer.eos_token_id if causal else None
        classes = self._classes if self.options.kind == "classifier" else ()
        return encode(documents, of(True), of(False), end=end, most=most, learns=causal and not packed, classes=classes)

    def _needed(self, model: nn.Module) -> Callable[[str], bool]:
        """What has to be stored: all, but for what a classifier has beside the layers of another model."""
        names = {*dict(model.named_parameters()), *pretrained.frozen(model)}
        prefix = f"{pretrained.layers(model)}." if self.options.kind == "classifier" else ""
        return lambda name: name in names and name.startswith(prefix)

    def _tell_new(self, names: list[str], frozen: Collection[str]) -> None:
        if left := [name for name in names if name in frozen]:
            raise TrainError(
                f"`train.options.lora`: {self._folder} has no `{pretrained.plain(left[0])}`, which adapters would "
                "leave as it is: learn all of the model (no `lora`), or name a folder that has it"
            )
        log.info("begin anew, since %s has none: %s", self._folder, ", ".join(names))

    def _adapt(self, model: Any) -> None:
        """Adapters; and the checksum of what they are learned for, by which another model's checkpoint is refused."""
        import peft  # 0.4 s beside transformers

        lora = self.options.lora
        assert lora is not None  # noqa: S101
        targets = "all-linear" if lora.targets is None else list(lora.targets)
        task = {"causal": "CAUSAL_LM", "classifier": "SEQ_CLS"}.get(self.options.kind)
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type=task
        )  # fmt: skip
        linear = [name for name, each in model.named_modules() if _is_linear(each)]
        refused = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of GPT-2's layers, whose weights lie the other way round
                peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            refused = error
        if config.target_parameters:  # peft has put them in place of names that layers of experts had once
            others = config.target_modules or {name.rpartition(".")[2] for name in linear} - set(lora.targets or ())
            raise TrainError(
                f"`train.options.lora.targets`: {type(model).__name__} has its experts' layers as single parameters "
                f"({', '.join(sorted(config.target_parameters))}), which get no adapters here: name other layers, "
                f"[{', '.join(sorted(others))}], or learn all of the model (no `lora`)"
            ) from refused
        if refused is not None:
            raise TrainError(f"`train.options.lora.targets`: {_why(refused, lora.targets or (), linear)}") from refused
        for name, parameter in model.named_parameters():  # the head is new
            if self.options.kind == "classifier" and not name.startswith(f"{model.base_model_prefix}."):
                parameter.requires_grad_(True)
        model.register_buffer(BASE, torch.zeros((), dtype=torch.int64))
        model.register_load_state_dict_pre_hook(self._refuse_another)

    def _quantise(self, model: Any) -> None:
        """The linear layers between embedding and head keep 4 bits a number, with an adapter or without."""
        nf4 = entries.of_extra("mgpu_train.models.nf4", "torchao", "`train.options.lora.quantize_base`")
        body = f"{pretrained.layers(model)}."
        found = {
            name: each
            for name, each in model.named_modules()
            if name.startswith(body) and _is_linear(each) and not each.weight.requires_grad
        }
        chosen = {name: each for name, each in found.items() if each.weight.numel() % nf4.BLOCK == 0}
        if not chosen:
            raise TrainError(
                f"`train.options.lora.quantize_base`: {type(model).__name__} has no linear layer of a multiple of "
                f"{nf4.BLOCK} numbers between embedding and head: leave it out"
            )
        for name, each in chosen.items():
            transposed = not isinstance(each, nn.Linear)
            model.set_submodule(name, nf4.Nf4Linear(each.weight, each.bias, transposed=transposed), strict=True)
        whole = sum(each.weight.numel() for each in chosen.values())
        rest = sum(each.numel() for each in model.parameters() if not each.requires_grad)
        log.info("%.3g numbers of %d layers are kept in NF4, %.3g others in float32", whole, len(chosen), rest)

    def _refuse_another(self, _model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        saved = int(state[f"{prefix}{BASE}"])
        if saved != self._checksum:
            raise TrainError(
                f"the checkpoint's adapters are of another model: its weights have the checksum {saved:x}, and those "
                f"in {self._folder} {self._checksum:x}. Give the model as it was, or begin a new run."
            )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D)


def _why(refused: ValueError, targets: Collection[str], linear: Collection[str]) -> str:
    """Why peft adapts nothing, where linear layers have these names."""
    if absent := [one for one in targets if not any(f".{name}".endswith(f".{one}") for name in linear)]:
        there = sorted({name.rpartition(".")[2] for name in linear})
        return f"no layer of the model ends in one of {', '.join(absent)}; there are {', '.join(there)}"
    return str(refused).partition("\n")[0]


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """Cut out of all documents, end to end: `length` tokens, one every `stride`."""

    tokens: Tokens
    length: int
    stride: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens.flat) - self.length) // self.stride + 1)

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Its tokens, and how many of them are not learned."""
        return self.tokens.flat[number * self.stride : number * self.stride + self.length], 0


@dataclass(frozen=True)
class Rows:
    """A document each, `length` tokens at most."""

    tokens: Tokens
    length: int

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Its tokens, and how many of them are not learned."""
        return self.tokens.read(number)[: self.length], int(self.tokens.prompts[number])


@dataclass(frozen=True)
class Causal:
    """Each token with the one that follows it."""

    samples: Windows | Rows
    fingerprint: str

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`tokens` and `labels`, int64 (B, L)."""
        found = [self.samples.read(number) for number in samples]
        follow = []
        for ids, prompt in found:
            labels = ids[1:].astype(np.int64)
            labels[: max(0, prompt - 1)] = _LEFT_OUT
            follow.append(labels)
        return {"tokens": _rows([ids[:-1] for ids, _ in found], 0), "labels": _rows(follow, _LEFT_OUT)}


@dataclass(frozen=True)
class Labelled:
    """Texts with a label each."""

    samples: Windows | Rows
    fingerprint: str
    padding: int
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`tokens` int64 (B, L), `mask` int64 (B, L), 0 for padding, and `labels` int64 (B,)."""
        found = [self.samples.read(number)[0] for number in samples]
        return {
            "tokens": _rows(found, self.padding),
            "mask": _rows([np.ones(len(ids)) for ids in found], 0),
            "labels": torch.from_numpy(self.labels[list(samples)]),
        }


@dataclass(frozen=True)
class Masked:
    """Texts with tokens that are hidden (Devlin et al. 2019): of those that are predicted, 80 % are replaced by `mask`,
    10 % by any other, and 10 % stay. Validation hides the same ones each time."""

    samples: Windows | Rows
    fingerprint: str
    padding: int
    special: np.ndarray  # bool, of each token: never hidden
    mask: int
    words: int
    share: float
    drawn: bool

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """`tokens` and `labels` int64 (B, L), `mask` int64 (B, L), 0 for padding."""
        whole = [self.samples.read(number)[0].astype(np.int64) for number in samples]
        draws = seeds if self.drawn else samples
        hidden = [self._hide(ids, number) for ids, number in zip(whole, draws, strict=True)]
        return {
            "tokens": _rows([ids for ids, _ in hidden], self.padding),
            "mask": _rows([np.ones(len(ids)) for ids in whole], 0),
            "labels": _rows([labels for _, labels in hidden], _LEFT_OUT),
        }

    def _hide(self, ids: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.Generator(np.random.Philox(seed))
        chance, how, others = draw.random(len(ids)), draw.random(len(ids)), draw.integers(self.words, size=len(ids))
        chance[self.special[ids]] = 1.0
        chosen = chance < self.share
        chosen[chance.argmin()] |= chance.min() < 1.0  # one at least
        hidden = np.where(how < 0.8, self.mask, np.where(how < 0.9, others, ids))
        return np.where(chosen, hidden, ids), np.where(chosen, ids, _LEFT_OUT)


def _rows(ids: Sequence[np.ndarray], padding: int) -> torch.Tensor:
    """As long as the longest one: int64 (B, L)."""
    made = np.full((len(ids), max(map(len, ids))), padding, np.int64)
    for row, each in zip(made, ids, strict=True):
        row[: len(each)] = each
    return torch.from_numpy(made)
