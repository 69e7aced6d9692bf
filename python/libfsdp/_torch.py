"""The torch that is installed: whether this package can work with it, and what it has to be told."""

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


def let_higher_order_operators_through() -> None:
    """``torch.cond``, ``flex_attention`` and the like are dispatched in Python, and would look for kernels for the keys
    that mark sharded parameters (``src/engine/tenant.h``). The operators in them are seen as any others."""
    import torch
    from torch import _ops

    try:
        for name in ("DeferredInit", "CustomRNGKeyId"):
            key = torch._C._parse_dispatch_key(name)
            _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)  # of those that are made later
            for operator in _ops._higher_order_ops.values():
                operator.fallthrough(key)
    except AttributeError:
        pass  # a torch that does it in another way: then these operators are errors
