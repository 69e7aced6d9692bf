import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config, items):
    """TEST_PART=0/3 leaves every third case, from the first on: the three parts may run side by side."""
    part, parts = map(int, os.environ.get("TEST_PART", "0/1").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part])
    items[:] = items[part::parts]
