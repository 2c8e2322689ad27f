"""The only module that prints. stdout carries results (a table, or JSON); progress, prompts and errors go to stderr.

rich is imported on first use: `mgpu --help` and `mgpu --version` never need it.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

from mgpu import writer
from mgpu.errors import Interrupted, MgpuError
from mgpu.table import Table
from mgpu.words import wrapped

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console as RichConsole
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from mgpu import events
    from mgpu.bars import Layers

PLAIN_EVERY_S = 10.0
BAR_EVERY_S = 5.0  # between two states of a program's own progress bar
LONGEST_LINE = 4000
LONGEST_STEP = 100  # of a Dockerfile, on the screen
SILENCE_S = 1.5  # after which a command says what it waits for
ROOM_S = 3.0  # that a node's lines wait for a terminal which takes nothing, before they are left out
# what a terminal would act on: escape sequences and control characters; tab stays
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC and other strings, ended or cut off
    r"|\x1b."  # two-character sequences
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def neutral(text: str) -> str:
    """`text` without anything that a terminal would act on: logs of a node are not to be trusted."""
    return _ESCAPES.sub("", text)


class LogLines:
    """Cuts the bytes of one node's log into printable lines; memory is bounded whatever arrives."""

    def __init__(self, node_rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._prefix = f"[{node_rank}] "
        self._rest, self._end = b"", 0
        self._clock, self._bar_at, self._bar = clock, clock(), b""

    def feed(self, data: bytes, offset: int | None = None) -> list[str]:
        """The whole lines in what has arrived; one that is too long is shown in pieces. `offset`: of `data` in the
        log, as in `cut`."""
        cut = self.cut(offset) if offset is not None else []
        self._end = (offset or 0) + len(data)
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()
        if len(self._rest) > LONGEST_LINE:
            parts.append(self._rest)
            self._rest = b""
        return [*cut, *(line for part in [*parts, *self._redrawn()] for line in self._show(part))]

    def _redrawn(self) -> list[bytes]:
        """A bar that is redrawn by carriage returns has no line end for hours: now and then its state is a line."""
        states = [state for state in self._rest.split(b"\r") if state.strip()]
        now = self._clock()
        if b"\r" not in self._rest or not states or states[-1] == self._bar or now < self._bar_at + BAR_EVERY_S:
            return []
        self._bar_at, self._bar = now, states[-1]
        return [states[-1]]

    def cut(self, offset: int) -> list[str]:
        """What is left without a line end, where the next bytes do not go on there: they are another machine's, which
        has got the node_rank."""
        return self.flush() if offset != self._end else []

    def flush(self) -> list[str]:
        """What is left without a line end."""
        rest, self._rest = self._rest, b""
        return self._show(rest) if rest else []

    def _show(self, line: bytes) -> list[str]:
        # a progress bar redraws its line by carriage returns: only its last state is a line
        text = neutral(line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace"))
        return [self._prefix + text[at : at + LONGEST_LINE] for at in range(0, len(text) or 1, LONGEST_LINE)]


class Console:
    """Renders results, events and errors for one command."""

    told: ClassVar[bool] = False  # a JSON result is on stdout

    def __init__(self, *, as_json: bool = False, show_logs: bool = False) -> None:
        self.as_json = as_json
        self.show_logs = show_logs
        self.interactive = sys.stderr.isatty()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._layers: Layers | None = None
        self._logs: dict[int, LogLines] = {}
        self._plain_at = 0.0
        self._plain_step: int | None = None
        self._validation: tuple[float | None, float] | None = None  # the newest that was shown: step, loss
        self._steps_are_known = False
        self._phase = ""
        self._rich: RichConsole | None = None
        self._deaf = False

    # --- results, on stdout -------------------------------------------------------------------------------------

    def result(self, result: BaseModel) -> None:
        """A command's result as JSON."""
        self.data(result.model_dump(mode="json"))

    def data(self, value: Any) -> None:
        """Plain data as JSON."""
        Console.told = True
        writer.settle(sys.stdout)
        sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")

    def text(self, text: str) -> None:
        """A result as it is."""
        writer.settle(sys.stdout)
        sys.stdout.write(text if text.endswith("\n") else text + "\n")

    def flush(self) -> None:
        """Lets a pipe have what is a result so far."""
        sys.stdout.flush()

    def raw(self, data: bytes) -> None:
        """A result byte for byte."""
        writer.settle(sys.stdout)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        spare: Sequence[str] = (),
        whole: Sequence[str] = (),
        numbers: Collection[str] = (),
    ) -> None:
        """A result as a table; away from a terminal it is as wide as it needs. `spare`: columns that a narrow terminal
        does without, first those named first; `whole`: those whose cells stay on one line; `numbers`: those that end
        below each other."""
        table = Table(columns, [[neutral(str(cell)) for cell in row] for row in rows], whole, numbers)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        if width is not None:
            table = table.fitting(width, spare)
            if left := [name for name in columns if name not in table.columns]:
                self.say(f"not shown for want of room: {', '.join(left)}", "dim")
        for line in table.lines(width):
            self.text(line)

    def prose(self, text: str) -> None:
        """A result in words; on a terminal its lines are broken between them."""
        terminal = sys.stdout.isatty()
        for line in wrapped(text, shutil.get_terminal_size().columns) if terminal else text.splitlines():
            self.text(line)

    # --- everything else, on stderr -----------------------------------------------------------------------------

    def say(self, text: str, style: str = "", *, whole: bool = False, patient: bool = False) -> None:
        """A line of progress. What comes from nodes and providers is in it: nothing of that acts on the terminal.

        A terminal's lines are broken between words, unless it is to stay `whole`. A terminal that is halted is not
        waited for, and may never show it, unless that is to be so: `patient`.
        """
        if patient:
            writer.settle(sys.stderr)
        from rich.text import Text

        def show() -> None:
            out = self._bar.console if self._bar else self._stderr()
            shown = neutral(text)
            if self.interactive and not whole:
                shown = "\n".join(wrapped(shown, out.width))
            out.print(Text(shown, style=style), soft_wrap=True)

        self._to_stderr(show)
        if patient:
            writer.settle(sys.stderr)

    @contextmanager
    def transfer(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Shows how many of `total` bytes are through; what it yields is told of more, from any thread.

        After Ctrl-C that raises Interrupted: the threads that move bytes are waited for, and have no other sign.
        """
        from mgpu.bars import Bar, Lines, interrupting

        self.done()
        shown = Bar(what, total, self._stderr()) if self.interactive else Lines(what, total, self.say)
        over = threading.Event()

        def add(size: int) -> None:
            if over.is_set():
                raise Interrupted(f"{what}: interrupted")
            shown.add(size)

        try:
            with interrupting(over.set):
                yield add
        finally:
            self._to_stderr(shown.stop)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Says what it is that takes so long, where it does."""
        timer = threading.Timer(SILENCE_S, self.say, (text, "dim"))
        timer.daemon = True
        with suppress(RuntimeError):  # there is no thread left for it: the command goes on in silence
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _to_stderr(self, show: Callable[[], None]) -> None:
        # the reader of a pipe has left, the terminal was closed, the disk is full: a run, and above all its teardown,
        # must not end of that
        if self._deaf:
            return
        try:
            show()
        except OSError:
            self._deaf = True

    def next(self, *lines: str) -> None:
        """What to type next."""
        if self.as_json:
            return
        # a command, and after four spaces or more what it is for
        pairs = [re.split(" {4,}", line, maxsplit=1) for line in lines]
        width = max((len(pair[0]) for pair in pairs if len(pair) > 1), default=0)
        for index, (command, *note) in enumerate(pairs):
            beside = f"{command:{width}}    {note[0]}" if note else command
            fits = not self.interactive or len("next: ") + len(beside) <= shutil.get_terminal_size().columns
            mark = "next: " if index == 0 else "      "
            self.say(mark + (beside if fits else command), "dim", whole=True)  # it is to be pasted
            if note and not fits:
                self.say(f"          {note[0]}", "dim")

    def error(self, error: MgpuError) -> None:
        """Three lines: what is wrong and where, why, and what to do next."""
        self.done()
        self.say(f"error: {neutral(error.what)}", "bold red")
        for text in ("" if error.why == error.what else error.why, error.next_step):
            for line in text.splitlines():
                self.say(f"  {neutral(line)}")

    def confirm(self, question: str) -> bool:
        """Asks on the terminal; away from one the answer is no."""
        return bool(self.answer(question))

    def answer(self, question: str, within_s: float | None = None) -> bool | None:
        """Asks on the terminal, again after a word that is no answer; None: there is none, or nobody answered within
        `within_s` seconds."""
        if not sys.stdin.isatty():
            return None
        self.done()
        while True:
            self._to_stderr(lambda: self._ask(f"{question} [y/N] "))
            if within_s is not None and not select.select([sys.stdin], [], [], within_s)[0]:
                return None
            word = sys.stdin.readline().strip().lower()  # nothing: Enter alone, or the terminal is gone
            if word in ("", "n", "no", "y", "yes"):
                return word in ("y", "yes")

    def _ask(self, prompt: str) -> None:
        if (out := self._writer()) is not None:
            out.drain(writer.CLOSE_S)
        file = self._stderr().file
        file.write(prompt)
        file.flush()

    def emit(self, event: events.Event) -> None:
        """Renders one progress event."""
        render = self._renderers.get(type(event).__name__)
        if render is not None:
            render(self, event)

    def done(self) -> None:
        """Takes the live bar away; what is printed next stands below it."""
        for lines in self._logs.values():
            for line in lines.flush():
                self.say(line, whole=True)
        if self._bar is not None:
            self._to_stderr(self._bar.stop)
            self._bar = self._task = None
        if self._layers is not None:
            self._to_stderr(self._layers.stop)
            self._layers = None

    # --- one renderer an event ----------------------------------------------------------------------------------

    def _phase_started(self, event: events.PhaseStarted) -> None:
        self._phase = event.phase
        self.say(f"▸ {event.phase}" + (f": {event.detail}" if event.detail else ""), "bold")

    def _phase_finished(self, event: events.PhaseFinished) -> None:
        if event.phase in ("image", "training"):
            self.done()
        self.say(f"  {event.phase} took {event.seconds:.1f} s", "dim")

    def _offer_tried(self, event: events.OfferTried) -> None:
        self.say(f"  {event.offer}: " + (event.refusal or "granted"))

    def _note(self, event: events.Note) -> None:
        self.say(f"  {event.text}")

    def _warned(self, event: events.Warned) -> None:
        self.say(f"  warning: {neutral(event.text)}", "yellow")

    def _image_step(self, event: events.ImageStep) -> None:
        number = f"{event.step}/{event.steps} " if event.steps else ""
        text = " ".join(event.text.split())
        self.say(f"  {number}{text if len(text) <= LONGEST_STEP else text[: LONGEST_STEP - 3] + '...'}")

    def _layer_pushed(self, event: events.LayerPushed) -> None:
        from mgpu.bars import Layers

        if self._layers is None:
            if self.interactive:
                self.done()  # a terminal has one live bar
            self._layers = Layers(self.say, self._stderr() if self.interactive else None)
            atexit.register(self.done)
        layers = self._layers
        self._to_stderr(lambda: layers.take(event.layer, event.state, event.done_bytes, event.total_bytes))

    def _committed(self, event: events.CheckpointCommitted) -> None:
        self.say(f"  checkpoint of step {event.step} committed ({event.checkpoint_id})", "green")

    def _spend(self, event: events.SpendChanged) -> None:
        self.say(f"  spent ${event.spent_usd:.2f} of ${event.max_usd:.2f} ({event.limit})", "yellow")

    def _recovered(self, event: events.Recovered) -> None:
        took = event.detected_s + event.stopped_s + event.repaired_s + event.resumed_s
        # of a program that says no steps nobody knows it
        again = f"; {event.steps_lost} steps done again" if self._steps_are_known else ""
        self.say(
            f"  back after {took:.1f} s: detected {event.detected_s:.1f} s, stopped {event.stopped_s:.1f} s, "
            f"repaired {event.repaired_s:.1f} s, resumed {event.resumed_s:.1f} s{again}",
            "green",
        )

    def _log(self, event: events.LogChunk) -> None:
        if not self.show_logs:
            return
        lines = self._logs.setdefault(event.node_rank, LogLines(event.node_rank)).feed(event.data, event.offset)
        if lines and self._has_room(ROOM_S, len(lines)):  # all at once: a program may print 200 MB
            self.say("\n".join(lines), whole=True)

    def _metrics(self, event: events.MetricsSampled) -> None:
        # a program of the user's own may say neither its steps nor a loss
        self._steps_are_known |= event.step is not None
        parts = [] if event.step is None else [f"step {event.step}" + (f"/{event.steps}" if event.steps else "")]
        parts += [f"loss {event.values['loss']:.4f}"] if event.values.get("loss") else []
        parts += [f"{event.values['tokens_per_s']:,.0f} tokens/s"] if event.values.get("tokens_per_s") else []
        self._validated(event.values)
        if self.interactive:
            self._to_stderr(lambda: self._draw(event, "  ".join(parts)))
        elif self._plain_due(event):
            self.say("  " + ("  ".join(parts) or event.phase))

    def _validated(self, values: dict[str, float]) -> None:
        step, loss = values.get("validation_step"), values.get("validation_loss")
        if loss is not None and (step, loss) != self._validation:
            self._validation = (step, loss)
            self.say(
                (f"  validation at step {step:.0f}" if step is not None else "  validation") + f": loss {loss:.4f}"
            )

    def _plain_due(self, event: events.MetricsSampled) -> bool:
        now = time.monotonic()
        if event.step == self._plain_step or now - self._plain_at < PLAIN_EVERY_S:
            return False
        self._plain_at, self._plain_step = now, event.step
        return True

    def _draw(self, event: events.MetricsSampled, numbers: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                console=self._stderr(),
                transient=True,
            )
            self._task = self._bar.add_task(event.phase, total=event.steps or None, numbers="")
            self._bar.start()
            atexit.register(self.done)  # an interrupt must not leave the terminal without its cursor
        if self._task is not None:
            self._bar.update(
                self._task,
                description=event.phase,
                completed=event.step or 0,
                total=event.steps or None,
                numbers=numbers,
            )

    def _has_room(self, within_s: float, lines: int) -> bool:
        """Whether stderr takes more, as `Writer.wait`; if not, so many lines are left out."""
        out = self._writer()
        if out is None or out.wait(within_s):
            return True
        out.leave_out(lines)
        return False

    def _writer(self) -> writer.Writer | None:
        return writer.of(getattr(sys.stderr, "rich_proxied_file", sys.stderr))  # a live bar's, in its place

    def _stderr(self) -> RichConsole:
        if self._rich is None:
            from rich.console import Console as RichConsole

            class Stderr(RichConsole):
                def on_broken_pipe(self) -> None:
                    raise  # the error that is being handled; rich would end this process here, without a teardown

            self._rich = Stderr(file=cast("IO[str] | None", self._writer()), stderr=True, highlight=False)
        return self._rich

    # by name: commands that emit nothing, such as `status`, do not pay for making the events' classes
    _renderers: ClassVar[dict[str, Callable[[Console, Any], None]]] = {
        "PhaseStarted": _phase_started,
        "PhaseFinished": _phase_finished,
        "OfferTried": _offer_tried,
        "Note": _note,
        "Warned": _warned,
        "ImageStep": _image_step,
        "LayerPushed": _layer_pushed,
        "CheckpointCommitted": _committed,
        "Recovered": _recovered,
        "SpendChanged": _spend,
        "LogChunk": _log,
        "MetricsSampled": _metrics,
    }
