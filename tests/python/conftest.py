import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import on_gpus  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config, items):
    """Tests that share processes follow one another. TEST_PART=0/3 leaves every third such group: three parts side by side."""
    if on_gpus.WANTED:
        leave(config, items, [on_gpus.is_for(item.path.name, item.name) for item in items])
        if not torch.cuda.is_available():
            for item in items:
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
    part, parts = map(int, os.environ.get("TEST_PART", "0/1").split("/"))
    groups = {process: i for i, process in enumerate(dict.fromkeys(map(processes_of, items)))}
    items.sort(key=lambda item: groups[processes_of(item)])
    leave(config, items, [groups[processes_of(item)] % parts == part for item in items])


def processes_of(item):
    """Tests that share processes have the same answer."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return (item.path, given["ranks"], given["means"]) if "means" in given else (item.path,)


def leave(config, items, which):
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, which) if not stays])
    items[:] = [item for item, stays in zip(items, which) if stays]
