"""The C++ trainer's weights from and for Hugging Face's libraries."""

import json
import os
import pathlib
import subprocess

import pytest
import torch

from harness import TIMEOUT

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FSDP_BIN", ""))
TEXT = (ROOT / "LICENSE").read_bytes() * 3
SEQUENCE = 24

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
pytestmark = pytest.mark.skipif(
    not os.environ.get("FSDP_BIN") or not (BIN / "train_gpt").exists(), reason="the C++ examples are not built (FSDP_BIN)"
)


def run(ranks, *command):
    launcher = [ROOT / "scripts" / "launch", "--ranks", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, timeout=TIMEOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def train(ranks, folder, *options):
    """What it wrote of the run: the losses on the text that is held back, before and after."""
    text = folder / "text"
    text.write_bytes(TEXT)
    common = ["--data", text, "--seq", SEQUENCE, "--batch", 2, "--sample", 4, "--out", folder / "out"]
    result = run(ranks, BIN / "train_gpt", *common, *options)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return lines[0]["held_back_loss"], lines[-1]["held_back_loss"]


def held_back_loss(model):
    """As the trainer takes it, of windows that are spread over the end of the text."""
    split = int(0.95 * len(TEXT))
    rest = torch.tensor(list(TEXT[split:]))
    windows = min((len(rest) - 1) // SEQUENCE, 128)
    stride = (len(rest) - 1) // windows
    rows = torch.stack([rest[i * stride : i * stride + SEQUENCE + 1] for i in range(windows)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def logits_of(model, count):
    with torch.no_grad():
        return model(torch.arange(count).unsqueeze(0)).logits


def our_logits(ranks, folder, count, tmp_path):
    result = run(ranks, os.environ["FSDP_TESTS"] + "/gpt2_logits", folder, count, tmp_path / "logits")
    assert result.returncode == 0, result.stderr
    values = torch.frombuffer(bytearray((tmp_path / "logits").read_bytes()), dtype=torch.float32)
    return values.view(1, count, -1)


def tiny_gpt2(**options):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=3, n_positions=40, vocab_size=300, bos_token_id=None, eos_token_id=None, **options
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # or biases are 0, and weights so small that all logits are alike
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("ranks", [1, 3])
def test_logits_are_those_of_transformers(ranks, tmp_path):
    model = tiny_gpt2()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    torch.testing.assert_close(our_logits(ranks, tmp_path / "theirs", 30, tmp_path), logits_of(model, 30), rtol=0, atol=1e-5)


def test_files_without_the_head_have_shorter_names(tmp_path):
    model = tiny_gpt2()
    model.transformer.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(our_logits(1, tmp_path / "theirs", 9, tmp_path), logits_of(model, 9), rtol=0, atol=1e-5)


def test_training_begins_with_weights_of_transformers_and_ends_with_weights_for_them(tmp_path):
    model = tiny_gpt2()
    model.save_pretrained(tmp_path / "theirs")
    options = ["--init-from", tmp_path / "theirs", "--steps", 3, "--export", tmp_path / "ours"]
    before, after = train(2, tmp_path, *options)
    assert before == pytest.approx(held_back_loss(model), abs=1e-5)
    trained = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    assert after == pytest.approx(held_back_loss(trained), abs=1e-5)
    assert abs(after - before) > 0.01
    torch.testing.assert_close(our_logits(2, tmp_path / "ours", 30, tmp_path), logits_of(trained, 30), rtol=0, atol=1e-5)


def test_a_model_that_began_here_is_a_gpt2_too(tmp_path):
    sizes = ["--width", 24, "--layers", 2, "--heads", 3]
    _, after = train(1, tmp_path, "--model", "gpt2", *sizes, "--steps", 3, "--export", tmp_path / "ours")
    exported = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    assert after == pytest.approx(held_back_loss(exported), abs=1e-5)


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_the_trainers_own_model_is_exported_and_goes_on(api, tmp_path):
    sizes = ["--width", 24, "--layers", 2, "--heads", 3, "--api", api]
    _, after = train(2, tmp_path, *sizes, "--steps", 3, "--export", tmp_path / "ours")
    before, _ = train(3, tmp_path, "--api", api, "--init-from", tmp_path / "ours", "--steps", 1)
    assert before == pytest.approx(after, abs=1e-6)


def assert_refused(expected, *options):
    result = run(1, BIN / "train_gpt", *options)
    assert result.returncode == 1 and expected in result.stderr, result.stderr


def test_what_is_no_gpt2_is_refused(tmp_path):
    assert_refused(f"expected a model's configuration in {tmp_path}/config.json, got none", "--init-from", tmp_path)
    config = tiny_gpt2().config
    for name, value, shown in [("model_type", "bert", '"bert"'), ("n_layer", 0, "0"), ("n_inner", 50, "50")]:
        (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), name: value}))
        assert_refused(f"as this program has it, got {name}: {shown}", "--init-from", tmp_path)


def test_weights_that_lack_are_named(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    assert_refused(f"expected all weights of a GPT-2 in {tmp_path}, got none for blocks.2.", "--init-from", tmp_path, "--seq", 8)
    assert_refused("expected no more than 40 for --seq", "--init-from", tmp_path)
    assert_refused("expected no --width", "--init-from", tmp_path, "--width", 24)
