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
    """TEST_PART=0/3 leaves every third case, from the first on: the three parts may run side by side."""
    if on_gpus.WANTED:
        config.hook.pytest_deselected(items=[item for item in items if not on_gpus.is_for(item.path.name, item.name)])
        items[:] = [item for item in items if on_gpus.is_for(item.path.name, item.name)]
        if not torch.cuda.is_available():
            for item in items:
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
    part, parts = map(int, os.environ.get("TEST_PART", "0/1").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part])
    items[:] = items[part::parts]
