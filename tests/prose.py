"""A text that no commit changes: what is learned from it, and the numbers that tests compare, stay as they are."""

from __future__ import annotations

import random
from pathlib import Path

FILES, WORDS = 20, 900  # of each file; about 5 kB
SYLLABLES = ("ba", "co", "din", "el", "fo", "gra", "hi", "is", "lu", "men", "or", "ra", "sto", "ti", "un", "ve")


def written(folder: Path) -> str:
    """The folder, with its files. Common words are short and rare ones long, as in a language."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(7).random  # of all that Python draws this alone is the same in each version
    words = ["".join(SYLLABLES[int(drawn() * 16)] for _ in range(1 + number // 40)) for number in range(160)]
    for number in range(FILES):
        text = " ".join(words[int(160 * drawn() ** 3)] + "." * (drawn() < 0.1) for _ in range(WORDS))
        (folder / f"{number}.txt").write_text(f"{text}\n")
    return str(folder)
