"""What benches print: costs side by side, and each figure with the target that it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.measure import Cost


@dataclass
class Report:
    """Prints as it goes, and everything that has a target once more at the end."""

    lines: list[str] = field(default_factory=list)

    def table(self, title: str, costs: Mapping[str, Cost]) -> None:
        """A row per client; ratios are to the first one."""
        print(f"\n{title}")
        columns = ("wall s", "CPU s", "(all)", "MiB", "(main", "others)", "server", "strangers", "speed", "CPU")
        print(f"  {'':<22}" + "".join(f" {column:>9}" for column in columns))
        first = next(iter(costs.values()))
        for name, cost in costs.items():
            seconds = (cost.wall_s, cost.cpu_s, cost.process_cpu_s)
            print(
                f"  {name:<22}"
                + "".join(f" {value:9.2f}" for value in seconds)
                + "".join(f" {value:9.0f}" for value in (cost.mib, cost.main_mib, cost.others_mib))
                + f" {cost.server_cpu_s:9.1f} {cost.strangers_cpu_s:9.1f}"
                + f" {first.wall_s / cost.wall_s:8.2f}x {cost.cpu_s / first.cpu_s:8.2f}x",
                flush=True,
            )

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """A figure that is to be high."""
        self._judge(what, value, limit, unit, "at least", met=value >= limit)

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """A figure that is to be low."""
        self._judge(what, value, limit, unit, "at most", met=value <= limit)

    def figure(self, what: str, value: float, unit: str = "") -> None:
        """A figure without a target."""
        self._say(f"{what:<62} {f'{value:.2f}{unit}':>12}")

    def holds(self, what: str, found: str, *, met: bool) -> None:
        """Something that is so, or is not."""
        self._say(f"{what:<62} {found:>12}  {'':<18} {'met' if met else 'NOT MET'}")

    def summary(self) -> None:
        """All targets again."""
        print("\nwhat it must reach")
        print("\n".join(self.lines), flush=True)

    def _judge(self, what: str, value: float, limit: float, unit: str, bound: str, *, met: bool) -> None:
        digits = 2 if limit >= 1 else 3
        figure, wanted = f"{value:.{digits}f}{unit}", f"{bound} {limit:g}{unit}"
        self._say(f"{what:<62} {figure:>12}  {wanted:<18} {'met' if met else 'NOT MET'}")

    def _say(self, line: str) -> None:
        self.lines.append(f"  {line}")
        print(f"  {line}", flush=True)
