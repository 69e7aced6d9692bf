"""The build backend: scikit-build-core's, once it is sure that there is a torch to build against.

Finds torch without importing it, in the environment that builds. Where pip isolates the build there is none, and what is
said then is the command that builds without isolation.
"""

import importlib.metadata
import os
import sys

from scikit_build_core.build import *  # noqa: F403
from scikit_build_core import build as _build

MINIMUM = (2, 11)


def _require_torch() -> None:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "libfsdp is built against the torch that is installed, and there is none in this build environment.\n"
            f"Install torch {MINIMUM[0]}.{MINIMUM[1]} or later and scikit-build-core, then run\n"
            "    pip install --no-build-isolation ."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
        raise SystemExit(
            f"libfsdp needs torch {MINIMUM[0]}.{MINIMUM[1]} or later, and {version} is installed. Install a newer torch."
        )
    os.environ["CMAKE_ARGS"] = f"-DFSDP_PYTHON={sys.executable} {os.environ.get('CMAKE_ARGS', '')}".strip()


def build_wheel(*args, **kwargs):
    _require_torch()
    return _build.build_wheel(*args, **kwargs)


def build_editable(*args, **kwargs):
    _require_torch()
    return _build.build_editable(*args, **kwargs)
