"""Models of transformers that are made in a moment, a tokenizer, and texts that they can learn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

WORDS = {"good": "kind bright warm lucky gentle", "bad": "cruel bleak cold broken bitter"}
NAMES = ("the dog", "a cat", "my house", "this road", "their song", "our boat", "one day", "her coat")
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=320, n_positions=64, bos_token_id=5, eos_token_id=5,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ),
    "llama": lambda: transformers.LlamaConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=1
    ),
    "bert": lambda: transformers.BertConfig(
        **SMALL, intermediate_size=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0, pad_token_id=1
    ),
    "wide": lambda: transformers.LlamaConfig(
        **SMALL, intermediate_size=64, num_key_value_heads=1, initializer_range=0.3, bos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SMALL, intermediate_size=32, num_key_value_heads=1, num_local_experts=2
    ),
}  # fmt: skip


def sentences(count: int) -> list[tuple[str, str]]:
    """Texts and labels: which one follows from one word of it."""
    draw = random.Random(5)
    told = [draw.choice(("good", "bad")) for _ in range(count)]
    return [(f"{draw.choice(NAMES)} was {draw.choice(WORDS[label].split())} and old", label) for label in told]


def tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Pairs of bytes, as the texts have them."""
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
    )
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("unk", "pad", "cls", "sep", "mask", "eos"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": value for name, value in names.items()}
    )
