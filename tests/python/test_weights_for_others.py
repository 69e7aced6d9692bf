"""Weights for other programs, and from them: safetensors files as the Hugging Face libraries have them."""

import importlib.util
import os
import pathlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import libfsdp
from checkpoint_runs import FORMS, Run, check_same
from fsdp1_subjects import quietly
from harness import on_ranks
from libfsdp import FullyShardedDataParallel, fully_shard
from subjects import seeded


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
@on_ranks(2, comm=("shm",))
def test_weights_for_other_programs(folder=None):
    for form in FORMS:
        run, other = Run(form), Run(form, seed=2)
        wanted = {name: value for name, value in run.values().items() if " " not in name}
        libfsdp.export_safetensors(f"{folder}/{form}", run.model, max_shard_bytes=300, name_in_files="model.{}".format)
        keys = libfsdp.import_safetensors(f"{folder}/{form}", other.model, name_in_files="model.{}".format)
        assert keys.missing_keys == [] and keys.unexpected_keys == []
        check_same({name: value for name, value in other.values().items() if " " not in name}, wanted, form)
        with pytest.raises(libfsdp.Error, match="is of another model"):
            libfsdp.import_safetensors(f"{folder}/{form}", other.model)
        check_same(in_safetensors(f"{folder}/{form}"), once({f"model.{name}": value for name, value in wanted.items()}), form)
        dist.barrier()
        libfsdp.export_safetensors(f"{folder}/{form}", run.model)
        dist.barrier()
        assert os.listdir(f"{folder}/{form}") == ["model.safetensors"]
        check_same(in_safetensors(f"{folder}/{form}"), once(wanted), form)


@on_ranks(1, comm=("shm",))
def test_names_are_those_of_modules_that_are_not_compiled(folder=None):
    """Others keep theirs, whatever they end in."""
    model = nn.ModuleDict({"x_orig_mod": nn.Linear(2, 2), "y": torch.compile(nn.Linear(2, 2), backend="eager")})
    path = libfsdp.save(folder, model)
    saved = {name for name in libfsdp.SavedCheckpoint(path).tensors if name.startswith("model/")}
    assert saved == {"model/x_orig_mod.weight", "model/x_orig_mod.bias", "model/y.weight", "model/y.bias"}


def in_safetensors(folder):
    """As the package that defines these files reads them."""
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted(pathlib.Path(folder).glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


def once(values):
    """Without the second name of what is tied."""
    return {name: value for name, value in values.items() if not name.endswith("block.2.bias")}


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="the package safetensors is not installed")
@on_ranks(2, comm=("shm",))
def test_matrices_may_lie_transposed_in_files(folder=None):
    import safetensors.torch as safetensors

    models = [fully_shard(seeded(lambda: nn.Linear(4, 6), seed)) for seed in (1, 2)]
    libfsdp.export_safetensors(folder, models[0], transposed="weight".__eq__)
    libfsdp.import_safetensors(folder, models[1], transposed="weight".__eq__)
    got = safetensors.load_file(f"{folder}/model.safetensors")
    wanted = [{name: value.full_tensor() for name, value in model.state_dict().items()} for model in models]
    for name, value in wanted[0].items():
        assert torch.equal(got[name].t() if name == "weight" else got[name], value)
        assert torch.equal(wanted[1][name], value)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="the package transformers is not installed")
@on_ranks(2, comm=("shm",))
def test_weights_of_transformers(folder=None):
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=31, n_positions=16)

    def made(seed):
        return seeded(lambda: transformers.GPT2LMHeadModel(config).eval(), seed)

    def logits(model):
        with torch.no_grad():
            return model(torch.arange(12).view(1, 12)).logits

    first = made(1)
    wanted = logits(first)
    if dist.get_rank() == 0:
        first.save_pretrained(f"{folder}/theirs")
        config.save_pretrained(f"{folder}/ours")
    dist.barrier()
    for form in ("fully_shard", "flat"):
        model = made(2)
        if form == "flat":
            sharded = quietly(FullyShardedDataParallel, model)
        else:
            for block in model.transformer.h:
                fully_shard(block)
            sharded = fully_shard(model)
        libfsdp.import_safetensors(f"{folder}/theirs", sharded)
        torch.testing.assert_close(logits(sharded), wanted, rtol=1e-5, atol=1e-6)
        libfsdp.export_safetensors(f"{folder}/ours", sharded, max_shard_bytes=2000)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/ours").eval()
        assert torch.equal(logits(loaded), wanted)
        dist.barrier()
