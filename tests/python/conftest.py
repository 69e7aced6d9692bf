import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import on_gpus  # noqa: E402
from selection import selected  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    config.addinivalue_line("markers", "meet(n): a few combinations of parameters, in which any n of them meet in every way")


@pytest.hookimpl(trylast=True)  # of what -k and -m have left
def pytest_collection_modifyitems(config, items):
    """Tests that share processes follow one another. TEST_PART=0/2 leaves every second such group: two parts side by side."""
    if on_gpus.WANTED:
        leave(config, items, [on_gpus.is_for(item.path.name, item.name) and means_of(item) != "shm" for item in items])
        if not torch.cuda.is_available():
            for item in items:
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
    leave_some(config, items)
    part, parts = map(int, os.environ.get("TEST_PART", "0/1").split("/"))
    groups = {process: i for i, process in enumerate(dict.fromkeys(map(processes_of, items)))}
    items.sort(key=lambda item: groups[processes_of(item)])
    leave(config, items, [groups[processes_of(item)] % parts == part for item in items])


def means_of(item):
    return item.callspec.params.get("means") if hasattr(item, "callspec") else None


def processes_of(item):
    """Tests that share processes have the same answer."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return (item.path, given["ranks"], given["means"]) if "means" in given else (item.path,)


def row_of(item):
    """Its parameters' values, which items share; not all of them can be hashed."""
    return tuple(map(id, item.callspec.params.values()))


def leave_some(config, items):
    marked = {}
    for item in items:
        if mark := item.get_closest_marker("meet"):
            marked.setdefault((item.path, item.originalname, *mark.args), []).append(row_of(item))
    chosen = {(*test, row) for test, rows in marked.items() for row in selected(rows, test[-1])}

    def stays(item):
        mark = item.get_closest_marker("meet")
        return not mark or (item.path, item.originalname, *mark.args, row_of(item)) in chosen

    leave(config, items, [stays(item) for item in items])


def leave(config, items, which):
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, which) if not stays])
    items[:] = [item for item, stays in zip(items, which) if stays]
