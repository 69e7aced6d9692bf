"""Trains with libraries that know PyTorch's `fully_shard`, on two ranks: with PyTorch's and with libfsdp's, side by side.

    make clients PYTHON=/path/to/python              # one that has the libraries; those that it lacks are skipped
    make clients PYTHON=/path/to/python ONLY=peft    # the cases whose names contain this

Random weights, random data, nothing is downloaded, everything on the CPU.
"""

import argparse
import ast
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HERE = pathlib.Path(__file__).resolve().parent
LIBRARIES = ("torch", "libfsdp")
TOLERANCE = 1e-5  # of losses and weights, relative to the largest
KNOWN = {  # docs/python.md has more
    "transformers_loading/tied_by_shards": "refused: tied shards fill their storage",
    "peft_adapters/lora_is_merged_for_good_safely": "PyTorch's loses what is merged",
}
ENDS = ("as with PyTorch", "not", "known to differ", "fail with PyTorch's own", "skipped")
HEAD = f"{'client':<48} {'steps':>5} {'losses':>9} {'weights':>9} {'time':>6}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose names contain NAME (default: all)")
    parser.add_argument("--list", action="store_true", help="only name the cases")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="leave what the ranks said and made there")
    return parser.parse_args()


def cases_of(script: pathlib.Path) -> list[str]:
    """Read from its text: the library may not be installed."""
    functions = [node for node in ast.parse(script.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [each.name for each in functions if any(getattr(mark, "id", None) == "case" for mark in each.decorator_list)]


def chosen(only: str) -> dict[str, list[str]]:
    cases = {script.stem: cases_of(script) for script in sorted(HERE.glob("*.py"))}
    cases = {client: [name for name in names if only in f"{client}/{name}"] for client, names in cases.items()}
    return {client: names for client, names in cases.items() if names}


def environment(scratch: pathlib.Path) -> dict[str, str]:
    quiet = dict(HF_HUB_OFFLINE=1, HF_DATASETS_OFFLINE=1, TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    found = os.pathsep.join(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    alone = dict(PYTHONPATH=found, OMP_NUM_THREADS=1, PYTHONDONTWRITEBYTECODE=1, HF_HOME=scratch, TMPDIR=scratch)
    return {**os.environ, **{name: str(value) for name, value in {**quiet, **alone}.items()}}


def run_client(client: str, names: list[str], library: str, scratch: pathlib.Path) -> pathlib.Path:
    folder = scratch / client / library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE / "ranks.py"), client, library, str(folder), *names]
    with open(folder / "said", "w") as said:
        ended = subprocess.run(command, env=environment(scratch), cwd=folder, stdout=said, stderr=subprocess.STDOUT)
    if ended.returncode:
        said = (folder / "said").read_text()[-4000:]
        sys.exit(f"{client} with {library}: ranks.py ended with {ended.returncode}\n{said}")
    return folder


def failure(folder: pathlib.Path, name: str) -> str | None:
    """The last line of the first rank's error that is one; the rest is printed below the table."""
    texts = [path.read_text().strip() for path in sorted(folder.glob(f"{name}.failed*"))]
    errors = [text for text in texts if "Traceback" in text] or texts
    return errors[0] if errors else None


def precise(tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def worst(pairs: list[tuple["torch.Tensor", "torch.Tensor"]]) -> float:
    """The largest difference, relative to the largest number."""
    differences = [(precise(a) - precise(b)).abs().max().item() for a, b in pairs if a.numel()]
    scale = max([1e-30, *(precise(b).abs().max().item() for _, b in pairs if b.numel())])
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0) / scale


def compare(ours: list[dict], theirs: list[dict]) -> tuple[str, bool]:
    """A row's numbers, and whether they will do."""
    import torch

    for mine, other in zip(ours, theirs, strict=True):
        if len(mine["losses"]) != len(other["losses"]) or set(mine["weights"]) != set(other["weights"]):
            alone, counts = set(mine["weights"]) ^ set(other["weights"]), (len(mine["losses"]), len(other["losses"]))
            return f"{counts[0]} losses, and {counts[1]} with PyTorch; weights of one only: {alone or 'none'}", False
    both = list(zip(ours, theirs, strict=True))
    losses = worst([(torch.tensor(a["losses"]), torch.tensor(b["losses"])) for a, b in both])
    weights = worst([(a["weights"][name], tensor) for a, b in both for name, tensor in b["weights"].items()])
    ratio = ours[0]["seconds"] / theirs[0]["seconds"]
    row = f"{len(ours[0]['losses']):>5} {losses:>9.1e} {weights:>9.1e} {ratio:>6.2f}"
    return row, max(losses, weights) <= TOLERANCE


def outcomes(folder: pathlib.Path, name: str) -> list[dict]:
    import torch

    return [torch.load(path) for path in sorted(folder.glob(f"{name}.outcome*"))]


def known(folders: dict[str, pathlib.Path], name: str) -> tuple[str, None, str] | None:
    reason = KNOWN.get(f"{folders['torch'].parent.name}/{name}")
    return reason and (f"known: {reason}", None, "known to differ")


def row_of(name: str, folders: dict[str, pathlib.Path]) -> tuple[str, str | None, str]:
    """The row, a text to print below the table, and which of ENDS it is."""
    failures = {library: failure(folders[library], name) for library in LIBRARIES}
    last = {library: text.splitlines()[-1][:150] for library, text in failures.items() if text}
    if failures["torch"]:
        ours = f"libfsdp: {last['libfsdp']}" if failures["libfsdp"] else "runs with libfsdp"
        return f"PyTorch's own fails ({last['torch']}); {ours}", failures["torch"], "fail with PyTorch's own"
    if failures["libfsdp"]:
        return known(folders, name) or (f"FAILED: {last['libfsdp']}", failures["libfsdp"], "not")
    row, is_well = compare(outcomes(folders["libfsdp"], name), outcomes(folders["torch"], name))
    if is_well:
        return row, None, "as with PyTorch"
    return known(folders, name) or (f"{row}  DIFFERENT", None, "not")


def rows(cases: dict[str, list[str]], scratch: pathlib.Path) -> Iterator[tuple[str, str, str | None, str]]:
    for client, names in cases.items():
        folders = {library: run_client(client, names, library, scratch) for library in LIBRARIES}
        skipped = folders["torch"] / "skipped"
        if skipped.exists():
            yield client, f"skipped: {skipped.read_text()}", None, "skipped"
            continue
        for name in names:
            yield (f"{client}/{name}", *row_of(name, folders))


def run(cases: dict[str, list[str]], scratch: pathlib.Path) -> bool:
    results, texts = [], []
    print(HEAD)
    for name, row, text, end in rows(cases, scratch):
        print(f"{name:<48} {row}", flush=True)
        results.append(end)
        texts += [f"\n== {name}\n{text}"] if text else []
    if texts:
        print(*texts, sep="\n", file=sys.stderr)
    print(", ".join(f"{results.count(end)} {end}" for end in ENDS))
    return "not" not in results


def main() -> int:
    arguments = parse_arguments()
    cases = chosen(arguments.only)
    if not cases:
        print(f"no case is named like '{arguments.only}': --list names them", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{client}/{name}" for client, names in cases.items() for name in names))
        return 0
    if arguments.keep:
        return 0 if run(cases, arguments.keep.resolve()) else 1
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if run(cases, pathlib.Path(scratch)) else 1


if __name__ == "__main__":
    sys.exit(main())
