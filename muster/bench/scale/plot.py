"""Draws docs/scale.png and fills in docs/scale.md from the JSON files of ``muster bench scale --sweep``.

python -m muster.bench.scale.plot muster/bench/results/scale_*.json --out docs/scale.png --page docs/scale.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMES = {
    "first_join_to_all_built_s": "first join to all built",
    "joins_s": "first to last join",
    "last_join_to_all_assigned_s": "last join to all assigned",
    "death_to_all_rebuilt_s": "1 % die, to all rebuilt",
}

BEGIN, END = "<!-- figures: written by muster/bench/scale/plot.py -->", "<!-- end of figures -->"


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Reads the reports; returns them in the order of the number of workers."""
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda report: int(report["workers"]))


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Returns the figures as a Markdown table."""
    lines = [
        "| workers | " + " | ".join(f"{name}, s" for name in TIMES.values()) + " | KB per worker"
        " | heartbeats/s | of one core |",
        "|" + "---:|" * (len(TIMES) + 4),
    ]
    for report in reports:
        times = " | ".join(f"{report[name]:.2f}" for name in TIMES)
        lines.append(
            f"| {report['workers']:,} | {times} | {report['scheduler_bytes_per_worker'] / 1000:.0f} | "
            f"{report['heartbeats_per_s']:,.0f} | {report['scheduler_cpu_share_of_one_core']:.0%} |"
        )
    return "\n".join(lines)


def conditions(report: dict[str, Any]) -> str:
    """Returns a sentence about the machine, the versions and the date of a report."""
    machine = report["machine"]
    packages = machine.get("packages", {})
    return (
        f"{machine['cores']} cores of {machine['cpu']}, shared by scheduler and load process; mutual TLS; "
        f"Python {machine['python']}, grpcio {packages.get('grpcio', '?')}; load average before the run "
        f"{machine['load_before']}; {machine['date'][:10]}."
    )


def fill_in(page: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Puts the table between the page's two markers."""
    head, rest = page.read_text().split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    page.write_text(f"{head}{BEGIN}\n{table(reports)}\n\n{conditions(reports[-1])}\n{END}{tail}")


def draw(reports: Sequence[dict[str, Any]], out: Path) -> None:
    """Writes the plot: times on the left, the scheduler's memory and processor on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workers = [report["workers"] for report in reports]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, label in TIMES.items():
        left.loglog(workers, [max(report[name], 1e-3) for report in reports], marker="o", label=label)
    left.set(xlabel="workers", ylabel="seconds", title="Formation")
    left.legend()
    memory = [report["scheduler_bytes_per_worker"] * report["workers"] / 1e6 for report in reports]
    right.loglog(workers, memory, marker="o", label="scheduler's memory above empty, MB")
    share = [100 * report["scheduler_cpu_share_of_one_core"] for report in reports]
    right.loglog(workers, share, marker="s", label="a heartbeat per worker and second, % of a core")
    right.set(xlabel="workers", title="Scheduler")
    right.legend()
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.25)
    machine = reports[-1].get("machine", {})
    figure.suptitle(
        f"{machine.get('cores', '?')} cores shared with the load, {machine.get('cpu', '?')}, mutual TLS",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the plot and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m muster.bench.scale.plot", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--out", type=Path, default=Path("docs/scale.png"), metavar="PNG")
    parser.add_argument("--page", type=Path, metavar="MD", help="also put the table into this page")
    options = parser.parse_args(argv)
    reports = read(options.files)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(reports, options.out)
    print(table(reports))
    if options.page is not None:
        fill_in(options.page, reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
