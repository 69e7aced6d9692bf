"""Draws results.json as SVG for people who would rather look than read: docs/img/steps.svg and docs/img/ratios.svg."""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS, THEIRS, TARGET = "#2a6fdb", "#b9bec7", "#d1495b"
LABELS = {"fsdp2": "PyTorch FSDP2", "fsdp1": "PyTorch FSDP1", "ddp": "PyTorch DDP", "compute": "compute alone"}


def step_times(rows: dict[str, dict], size: str) -> dict[str, float]:
    """Milliseconds a step, by contender."""
    times = {}
    for contender, label in LABELS.items():
        middle = "_" if contender == "compute" else "_2ranks_"
        row = rows.get(f"step_{size}{middle}vs_{contender}")
        if row:
            times[label] = row["theirs"]
            times["libfsdp"] = row["ours"]
    return dict(sorted(times.items(), key=lambda entry: -entry[1]))


def draw_steps(rows: dict[str, dict], machine: dict, file: pathlib.Path) -> None:
    sizes = [(size, label) for size, label in (("117m", "117.7 M"), ("34m", "33.7 M")) if step_times(rows, size)]
    if not sizes:
        return
    figure, axes = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 2.6), squeeze=False)
    for axis, (size, label) in zip(axes[0], sizes, strict=True):
        times = step_times(rows, size)
        colors = [OURS if name == "libfsdp" else THEIRS for name in times]
        bars = axis.barh(list(times), list(times.values()), color=colors)
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        axis.set_title(f"GPT, {label} parameters: ms a step", fontsize=10)
        bare(axis)
    save(figure, machine, file)


def draw_ratios(rows: dict[str, dict], machine: dict, file: pathlib.Path) -> None:
    """Every row whose ratio says how many times as much PyTorch takes, with its target."""
    chosen = [row for row in rows.values() if row.get("ratio") and not (row["target"] or "").startswith("<=")]
    if not chosen:
        return
    chosen.reverse()
    figure, axis = plt.subplots(figsize=(10, 0.26 * len(chosen) + 0.8))
    names, ratios = [row["name"] for row in chosen], [row["ratio"] for row in chosen]
    bars = axis.barh(names, ratios, color=OURS)
    axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=7)
    for i, row in enumerate(chosen):
        if row["target"]:
            target = float(row["target"].split()[1])
            axis.plot([target, target], [i - 0.45, i + 0.45], color=TARGET, linewidth=2)
    axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=0.5)
    axis.set_title("How many times as much PyTorch takes (red: target)", fontsize=10)
    bare(axis)
    save(figure, machine, file)


def bare(axis) -> None:
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure, machine: dict, file: pathlib.Path) -> None:
    note = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"
    figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=6, color="gray")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    print(f"Drawn: {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    entries = json.loads(arguments.results.read_text())
    machine = next(entry for entry in entries if entry["name"] == "machine")
    rows = {entry["name"]: entry for entry in entries if entry is not machine}
    plt.rcParams["svg.hashsalt"] = "libfsdp"
    draw_steps(rows, machine, arguments.folder / "steps.svg")
    draw_ratios(rows, machine, arguments.folder / "ratios.svg")


if __name__ == "__main__":
    main()
