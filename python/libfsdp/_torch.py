"""Whether the torch that is installed is one that this package can work with."""

MINIMUM = (2, 11)


def check_torch() -> None:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"libfsdp needs torch {MINIMUM[0]}.{MINIMUM[1]} or later, and none is installed: pip install torch"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM:
        raise ImportError(
            f"libfsdp needs torch {MINIMUM[0]}.{MINIMUM[1]} or later, and {torch.__version__} is installed: "
            "install a newer torch, then libfsdp again"
        )
    if not torch.distributed.is_available():
        raise ImportError("libfsdp needs a torch that was built with torch.distributed")
    try:
        from . import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"libfsdp does not load with torch {torch.__version__}; it was built against another one, or not at all "
            f"({error}): pip install --no-build-isolation --force-reinstall --no-deps . builds it anew"
        ) from error
