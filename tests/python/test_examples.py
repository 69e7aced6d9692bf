"""The examples run, and give what they say."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from harness import TIMEOUT, run_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "python"


def torchrun(script, ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*command, str(script), *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize(
    ("script", "imported"),
    [("switch_from_pytorch.py", "fully_shard"), ("fsdp1.py", "FullyShardedDataParallel as FSDP")],
)
def test_one_line_switches_from_pytorch(script, imported, tmp_path):
    ours = EXAMPLES / script
    theirs = tmp_path / "before.py"
    line = f"\nfrom libfsdp import {imported}\n"
    assert line in ours.read_text()
    theirs.write_text(ours.read_text().replace(line, f"\nfrom torch.distributed.fsdp import {imported}\n"))
    outputs = [run_program(script, 2) for script in (ours, theirs)]
    losses = [[float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)] for output in outputs]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)  # sums are taken in another order
    kept = [re.findall(r"rank 0 has .*", output) for output in outputs]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_gives_the_losses_of_the_cpp_trainer(ranks, tmp_path):
    trainer = pathlib.Path(os.environ.get("FSDP_BIN", "")) / "train_gpt"
    if not os.environ.get("FSDP_BIN") or not trainer.exists():
        pytest.skip("the C++ examples are not built (FSDP_BIN)")
    text = tmp_path / "text"
    text.write_bytes(b"".join(sorted(path.read_bytes() for path in ROOT.glob("docs/*.md"))))
    sizes = ["--data", text, "--steps", 12, "--width", 64, "--layers", 2, "--heads", 4, "--seq", 64, "--warmup", 4]
    subprocess.run(
        [ROOT / "scripts" / "launch", "--ranks", str(ranks), trainer, *map(str, sizes), "--out", tmp_path / "out",
         "--sample", "0"],
        check=True, capture_output=True, timeout=TIMEOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    expected = [line["loss"] for line in lines if line["event"] == "step"]
    run = torchrun if ranks == 2 else run_program
    run(EXAMPLES / "train_gpt.py", ranks, *sizes, "--json", tmp_path / "losses.json")
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 12 and losses == expected
