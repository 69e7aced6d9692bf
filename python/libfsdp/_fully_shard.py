"""``fully_shard``: converts its arguments, has the engine make a unit, and shows its parameters."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from . import _C
from ._composable import applied_to, mark
from ._extended import Extended, GatherHooks, is_extended, stand_in
from ._layout import DataParallel, Layout
from ._mesh import check_mesh, default_mesh
from ._module import FSDPModule, sharded_class
from ._policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from ._sharded import Sharded, local_of
from ._sharded_dtensor import DTensorSharded
from ._state import FSDPState, state_of
from ._units import is_home, named_modules, places_of, sharded_elsewhere, slots_to_shard, view_of


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shards the parameters of a module, or of several as one unit, over the ranks of a mesh.

    Parameters that an earlier call on a submodule took stay with it, so call it on the blocks first and on the whole
    model last. From then on ``module.parameters()`` are this rank's shards, as DTensors, while ``module.weight`` is the
    whole parameter to whoever reads it.

    Args:
        module: the module, or a list of modules that are gathered and reduced together.
        mesh: one dimension to shard over, or two: replicate, shard. Default: all ranks.
        reshard_after_forward: whether whole parameters are freed between forward and backward; a number: freed down to
            shards among so many ranks. Default: freed, except a root's.
        shard_placement_fn: says along which dimension a parameter is cut: ``Shard(dim)``, or None for the first.
        mp_policy: in which dtypes to compute and to reduce.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer on the host.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: where parameters are DTensors on a larger mesh, which of its dimensions are data parallel.

    Returns:
        What was given, sharded in place; its class is now ``FSDP<Class>``.
    """
    modules = _checked_modules(module)
    mesh = mesh or default_mesh()
    if dp_mesh_dims is None:
        check_mesh(mesh)
    _check_reshard(reshard_after_forward, mesh, dp_mesh_dims)
    parallel = DataParallel.over(mesh, dp_mesh_dims)
    arguments = dict(
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        dp_mesh_dims=dp_mesh_dims,
    )
    unit, places, parallels = _make_unit(modules, set(ignored_params or ()), arguments, parallel)
    state = FSDPState(unit, arguments, parallels)
    for owner, name, sharded in places:
        state.add(owner, name, sharded)
    for each in modules:
        each.__dict__["_fsdp_state"] = state
        mark(each)
        each.__class__ = sharded_class(type(each))
    return module


fully_shard.state = state_of


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets calls of a method have the module's boundary: inputs and outputs cast as a forward's are.

    For parameters no method needs it. Does nothing for a module that is not sharded.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    if not module._get_fsdp_state().converts:
        return
    method = _as_function(getattr(module, method_name), module)

    @functools.wraps(method)
    def through_boundary(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._get_fsdp_state().call(method, (self, *args), kwargs)

    module.__dict__[method_name] = through_boundary.__get__(module)


def _as_function(method: Callable, module: nn.Module) -> Callable:
    """Takes the module first, whichever it is: a copy of the module is going to call it on itself."""
    if getattr(method, "__self__", None) is module:
        return method.__func__
    return functools.wraps(method)(lambda _, *args, **kwargs: method(*args, **kwargs))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """The units below several roots share streams, the bound on memory and the limit of reductions in flight."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    if modules:
        _C.share_comm_ctx([module._get_fsdp_state().unit for module in modules])


def _is_compiled(module: nn.Module) -> bool:
    """Made by ``torch.compile``. Who has not imported that, which takes seconds, has no such module."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _checked_modules(module: Any) -> list[nn.Module]:
    alone = isinstance(module, nn.Module)
    if not alone and not isinstance(module, Iterable):
        raise ValueError(f"fully_shard expects a module or a list of modules, got {type(module)}")
    modules = [module] if alone else list(module)
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ValueError(f"fully_shard expects modules, got {type(each)}")
        if _is_compiled(each):
            raise ValueError(
                "fully_shard was given what torch.compile had made of a module. Call fully_shard first, then torch.compile, "
                "or use module.compile()"
            )
    if not modules:
        raise ValueError("fully_shard expects a module or a list of at least one module, got an empty list")
    below = {child for each in modules for child in each.modules() if child is not each}
    modules = [each for each in dict.fromkeys(modules) if each not in below]
    for each in modules:
        if alone and isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {each}. "
                "Call it on the modules inside, or pass them as a list"
            )
        if "fully_shard" in applied_to(each):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to the following module:\n{each}"
            )
    return modules


def _check_reshard(reshard_after_forward: Any, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward}"
        )
    if dims is not None:
        raise NotImplementedError("reshard_after_forward as int is not supported with dp_mesh_dims: pass True or False")
    ranks = mesh.size(mesh.ndim - 1)
    if reshard_after_forward < 1 or ranks % reshard_after_forward != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks}, not {reshard_after_forward}"
        )


def _placement(
    parameter: nn.Parameter, path: str, function: Callable[[nn.Parameter], Any] | None
) -> tuple[int, DeviceMesh | None]:
    """The dimension along which a parameter is cut, and over which mesh if it is not the unit's."""
    placement = function(parameter) if function else None
    mesh = None
    if hasattr(placement, "mesh_info"):  # PyTorch's ShardPlacementResult
        if getattr(placement.mesh_info, "spmd_mesh", None) is not None:
            raise NotImplementedError(
                f"shard_placement_fn gave '{path}' a mesh with data parallel dimensions of its own (spmd_mesh): put its "
                "module into a call of its own, with mesh and dp_mesh_dims"
            )
        placement, mesh = placement.placement, placement.mesh_info.mesh
        check_mesh(mesh)
    if placement is None:
        return 0, mesh
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn should return a Shard, a ShardPlacementResult or None, got {placement} for '{path}'"
        )
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise AssertionError(
            f"Shard dim {placement.dim} is invalid for {parameter.ndim}D tensor '{path}' of shape {tuple(parameter.shape)}"
        )
    return dim, mesh


def _check_parameter(parameter: nn.Parameter, path: str) -> None:
    if parameter.ndim == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters. Change {path} to a 1D tensor with numel equal to 1."
        )
    local = local_of(parameter)
    if hasattr(local, "fsdp_pre_all_gather") != hasattr(local, "fsdp_post_all_gather"):
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions, and "
            f"the {type(local).__name__} '{path}' has one of them"
        )


def _check_not_below(modules: list[nn.Module], slots: list[list[tuple]]) -> None:
    """An error if nothing is left to shard, because of a call on a module above."""
    decided = {module for each in modules for child in each.modules() if state_of(child) for module in child.modules()}
    taken = [path for own in slots for path, owner, name, _ in own if owner not in decided and is_home(owner, name)]
    if taken:
        raise ValueError(
            f"fully_shard was called on a {type(modules[0]).__name__} whose parameters ({', '.join(taken)}) an earlier call "
            "on a module above it has sharded: call it on the blocks first, and on the whole model last"
        )


def _make_unit(
    modules: list[nn.Module], ignored: set[nn.Parameter], arguments: dict[str, Any], parallel: DataParallel
) -> tuple[_C.Unit, list[tuple], list[DataParallel]]:
    views, slots = [], []
    planned: dict[nn.Parameter, _Plan] = {}
    for root in modules:
        own = slots_to_shard(root, ignored)
        for slot in own:
            if slot[3] not in planned and not _C.belongs_to_unit(local_of(slot[3])):
                planned[slot[3]] = _plan(slot, arguments, parallel)
        views.append(view_of(root, own, {parameter: plan.tensor for parameter, plan in planned.items()}))
        slots.append(own)
    if not planned:
        _check_not_below(modules, slots)
    options = _engine_options(arguments, parallel, [plan.placement for plan in planned.values()])
    unit, shards = _C.shard_modules(views, options)
    parallels = {plan.parallel.mesh: plan.parallel for plan in planned.values()} or {parallel.mesh: parallel}
    made = functools.partial(_sharded_for, planned)
    return unit, places_of(slots, shards, made), list(parallels.values())


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a parameter is going to be sharded."""

    tensor: torch.Tensor  # that the engine is given
    placement: tuple[torch.Tensor, int, _C.Mesh | None, _C.GatherExtension | None]
    parallel: DataParallel
    layout: Layout
    hooks: GatherHooks | None  # if it is gathered by hooks of its own


def _plan(slot: tuple[str, nn.Module, str, nn.Parameter], arguments: dict[str, Any], parallel: DataParallel) -> _Plan:
    path, owner, _, parameter = slot
    _check_parameter(parameter, path)
    dim, mesh = _placement(parameter, path, arguments["shard_placement_fn"])
    own_parallel = DataParallel.over(mesh, None) if mesh else parallel
    own_parallel.check(parameter, path)
    layout = own_parallel.layout(parameter, dim)
    tensor, hooks, extension = local_of(parameter), None, None
    if is_extended(tensor):
        tensor = stand_in(parameter)
        hooks = GatherHooks(parameter, owner, path, dim, own_parallel, arguments)
        extension = _C.GatherExtension(hooks)
    placement = (tensor, dim, own_parallel.engine if mesh else None, extension)
    return _Plan(tensor, placement, own_parallel, layout, hooks)


def _check_policy(policy: MixedPrecisionPolicy) -> None:
    known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    for field in dataclasses.fields(policy):
        if field.name not in known and getattr(policy, field.name) != field.default:
            raise NotImplementedError(
                f"libfsdp does not have MixedPrecisionPolicy.{field.name}, which torch {torch.__version__} has: leave it "
                "out, and shard modules that need another policy in a call of their own"
            )


def _engine_options(
    arguments: dict[str, Any], parallel: DataParallel, placements: list[tuple]
) -> _C.FullyShardOptions:
    policy, offload = arguments["mp_policy"], arguments["offload_policy"]
    _check_policy(policy)
    options = _C.FullyShardOptions(parallel.engine, arguments["reshard_after_forward"])
    options.set_precision(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)
    if isinstance(offload, CPUOffloadPolicy):
        options.set_offload(offload.pin_memory)
    options.set_placements(placements)
    return options


def _sharded_for(planned: dict[nn.Parameter, _Plan], shard: torch.Tensor, parameter: nn.Parameter) -> Sharded:
    plan = planned.get(parameter)
    if plan is None:
        return sharded_elsewhere(shard, parameter)
    if plan.hooks is not None:
        return Extended(shard, parameter, plan.layout, plan.hooks)
    return DTensorSharded(shard, parameter, plan.layout)
