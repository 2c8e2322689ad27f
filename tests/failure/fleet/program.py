"""A training program without torch: `program.py BOOK STORE STEPS PAUSE_S EVERY [SAVE_S [LINGER_S]]`.

All ranks go step by step together, and agree on when to stop, by files in BOOK, a folder outside of all nodes: so they
hang when a peer is gone, as ranks in a collective do. What each of them has really done is in BOOK/book.jsonl. Its
steps are so short that on a slow machine uploads would fall behind: a save waits until the one before is in STORE.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

BOOK, STORE, STEPS = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
PAUSE_S, EVERY = float(sys.argv[4]), int(sys.argv[5])
SAVE_S, LINGER_S = (float(value) for value in (*sys.argv[6:], 0, 0)[:2])
RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MGPU_ATTEMPT"))
HANGS_S = 60  # without a peer

stop: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))


def append(path: Path, line: dict) -> None:
    """One write of one line: those of two processes never mix."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def note(kind: str, step: int) -> None:
    """What this rank does, for the judge."""
    line = {"at": time.time(), "kind": kind, "step": step, "attempt": ATTEMPT, "rank": RANK}
    append(BOOK / "book.jsonl", line | {"instance": os.environ["MGPU_INSTANCE"]})


def measure(kind: str, **what: object) -> None:
    """One line of metrics, as mgpu's own trainer writes them."""
    folder = Path(os.environ["MGPU_METRICS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    append(folder / f"rank-{RANK}.jsonl", {"kind": kind, **what})


def agree(step: int) -> bool:
    """Meets all ranks after this step; True when any of them was asked to stop by then."""
    mine = BOOK / f"{ATTEMPT}-{RANK}-{step}"
    mine.with_suffix(".new").write_text(str(len(stop)))
    mine.with_suffix(".new").replace(mine)
    end, said = time.monotonic() + HANGS_S, []
    for rank in range(WORLD):
        path = BOOK / f"{ATTEMPT}-{rank}-{step}"
        while not path.exists():
            if time.monotonic() > end:
                sys.exit(f"gloo: rank {rank} does not answer")
            time.sleep(0.005)
        said.append(path.read_text() != "0")
    return any(said)


def held(step: int) -> None:
    """Waits after the step that BOOK/hold names, until a rank is asked to stop."""
    hold = BOOK / "hold"
    while ATTEMPT == 1 and not stop and hold.exists() and hold.read_text() == str(step):
        time.sleep(0.005)
    if stop:
        hold.unlink(missing_ok=True)


def committed() -> int:
    """The newest step in the commit log; what is still being written has another name."""
    found = (json.loads(path.read_text()) for path in STORE.glob("*/commits/0*.json"))
    return max((entry.get("manifest", {}).get("step", 0) for entry in found), default=0)


def keep_up(step: int, first: int) -> None:
    """Waits until the save before this step's is committed."""
    end = time.monotonic() + HANGS_S
    while first < step - EVERY and committed() < step - EVERY and not stop:
        if time.monotonic() > end:
            sys.exit(f"step {step - EVERY} is not committed after {HANGS_S} s")
        time.sleep(0.02)


def weights(step: int) -> bytes:
    """What training has come to."""
    return step.to_bytes(4, "big") * 4096


def save(step: int) -> None:
    """Two files aside, SAVE_S apart, then the rename."""
    note("saving", step)
    began = time.monotonic()
    root = Path(os.environ["MGPU_CHECKPOINT_DIR"])
    aside = root / f".tmp-step-{step}-{os.getpid()}"
    aside.mkdir(parents=True)
    (aside / f"count-{RANK}.txt").write_text(str(step))
    time.sleep(SAVE_S)
    (aside / f"rank-{RANK}.bin").write_bytes(weights(step))
    aside.rename(root / f"step-{step}")
    measure("checkpoint", step=step, stall_s=time.monotonic() - began)
    note("saved", step)


def restored(folder: Path) -> int:
    """The step of a checkpoint, which is whole."""
    step = int((folder / "count-0.txt").read_text())
    assert (folder / "rank-0.bin").read_bytes() == weights(step)
    return step


def main() -> None:
    """Counts from where it is to go on to the last step."""
    resume = os.environ.get("MGPU_RESUME_DIR")
    first = restored(Path(resume)) if resume else 0
    note("start", first)
    print(f"rank {RANK} attempt {ATTEMPT} from {first}", flush=True)  # noqa: T201
    step, stopping = first, False
    while step < STEPS and not stopping:
        time.sleep(PAUSE_S)
        held(step)
        step += 1
        stopping = agree(step)
        note("step", step)
        measure("step", step=step, steps=STEPS, loss=1 / step)
        if step % EVERY == 0 or step == STEPS or stopping:
            if not stopping:
                keep_up(step // EVERY * EVERY, first)
            save(step)
        if ATTEMPT == 1 and (words := BOOK / f"fails-{RANK}").exists():
            sys.exit(words.read_text())  # its peers hang
    if ATTEMPT == 1:
        time.sleep(LINGER_S)  # what a program may do when all is saved
    measure("end", step=step, reason="stopped" if stopping else "done")
    note("end", step)


main()
