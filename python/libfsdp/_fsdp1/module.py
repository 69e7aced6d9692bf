"""``FullyShardedDataParallel``: a module that wraps another, whose parameters are cut as one flat parameter."""

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .. import _C
from .._state import _cast_to, map_tensors
from .._tools import clip_grad_norm_
from . import optimizer_legacy, optimizer_state_dicts, state_dict_types, state_dicts
from ._pytorch import FSDP_PREFIX, LOW_PRECISION_HOOKS, TrainingState, auto_wrap, without_checkpoint
from .buffers import cast_buffers, restore_buffers
from .copies import copy_values, copy_wrapped
from .device import compute_device, managed_params, materialize
from .groups import HYBRID, Groups, ProcessGroups
from .ignored import Ignored
from .state import instances_below, roots_below
from .summon import summon
from .unit import engine_options, make_unit, refuse_optimizers_in_backward

HOMOGENEOUS = ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval")
COPIED_OF_MODULES = {
    "training",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
}
SHARED_BY_COPIES = ("process_group", "_inter_node_pg", "_device_mesh", "_groups", "_comm_hook")


class FullyShardedDataParallel(nn.Module):
    """Wraps a module and shards its parameters over the ranks of a process group.

    Arguments, methods and errors are those of ``torch.distributed.fsdp.FullyShardedDataParallel``; what is different
    stands in docs/python.md.
    """

    __call__ = _C.call_sharded
    _original_call = nn.Module.__call__

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable | Any | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ):
        super().__init__()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"FSDP will not all-gather parameters for containers that do not implement forward: {module}", stacklevel=2
            )
        self._ignored = Ignored.of(module, ignored_modules, ignored_states)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        groups = Groups.of(strategy, process_group, device_mesh, auto_wrap_policy is not None)
        self._groups = groups
        self.process_group, self._inter_node_pg, self._device_mesh = groups.shard, groups.replicate, device_mesh
        self.rank, self.world_size = groups.shard.rank(), groups.shard.size()
        self.cpu_offload, self.mixed_precision = cpu_offload or CPUOffload(), mixed_precision or MixedPrecision()
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers, self._use_orig_params = limit_all_gathers, use_orig_params
        self._use_full_prec_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self._state_dict_settings = state_dict_types.default_settings()
        self._summoned, self._is_prepared = False, False
        if auto_wrap_policy is not None:
            arguments = dict(
                process_group=process_group if device_mesh is not None else groups.as_argument(),
                sharding_strategy=sharding_strategy,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                param_init_fn=param_init_fn,
                device_id=device_id,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
                ignored_states=self._ignored.params,
                device_mesh=device_mesh,
            )
            self._wrap_below(module, auto_wrap_policy, arguments)
        self.sharding_strategy = self._strategy_of(sharding_strategy)
        params = managed_params(module, self._ignored.params)
        self.compute_device = compute_device(params, device_id, device_mesh)
        materialize(module, params, self._ignored.modules, param_init_fn, self.compute_device)
        self._shard(module, sync_module_states)

    def _shard(self, module: nn.Module, sync_module_states: bool = False) -> None:
        options = engine_options(
            self._groups,
            self.sharding_strategy,
            self.compute_device,
            self.mixed_precision,
            self.cpu_offload,
            sync_module_states,
        )
        state = make_unit(module, self._ignored, options, self.compute_device, self._use_orig_params)
        _C.show_waiting_gradients(state.unit)
        _C.set_keep_gradient_dtype(state.unit, self.mixed_precision.keep_low_precision_grads)
        self._fsdp_wrapped_module = module
        self.__dict__["_fsdp_state"] = state
        state_dicts.install_hooks(self)

    def _wrap_below(self, module: nn.Module, policy: Callable | Any, arguments: dict[str, Any]) -> None:
        for name, child in module.named_modules():
            if instances_below(child)[:1] == [child]:
                raise ValueError(
                    "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                    f"{name} in\n{module}"
                )
        auto_wrap(module, policy, self._ignored.modules, self._ignored.params, arguments, FullyShardedDataParallel)

    def _strategy_of(self, given: ShardingStrategy | None) -> ShardingStrategy:
        if self.world_size == 1 and self._inter_node_pg is None:
            if given is not ShardingStrategy.NO_SHARD:
                warnings.warn(
                    f"FSDP is switching to use `NO_SHARD` instead of {given or ShardingStrategy.FULL_SHARD} since the world "
                    "size is 1.",
                    stacklevel=3,
                )
            return ShardingStrategy.NO_SHARD
        if given is ShardingStrategy.NO_SHARD:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel` "
                "instead.",
                FutureWarning,
                stacklevel=3,
            )
        return given or ShardingStrategy.FULL_SHARD

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return without_checkpoint(self._fsdp_wrapped_module)

    @property
    def training_state(self) -> TrainingState:
        if self._summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        if self._fsdp_state.calls.running or torch._C._current_graph_task_id() != -1:
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        states = [state] if isinstance(state, TrainingState) else state
        if self.training_state not in states:
            raise ValueError(f"expected to be in states {states} but current state is {self.training_state}")

    def __getattr__(self, name: str) -> Any:
        """What the wrapper has not, the wrapped module may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_fsdp_wrapped_module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module.__getitem__(key)

    def check_is_root(self) -> bool:
        """Whether no other wrapper contains this one."""
        return self._fsdp_state.is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """The wrappers in a module, itself among them; with ``root_only`` those that no other one contains."""
        return roots_below(module) if root_only else instances_below(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._fsdp_state
        is_root = state.is_root
        if is_root and not self._is_prepared:
            self._prepare()
        if is_root and self._use_full_prec_in_eval:
            self._follow_training()
        if self.mixed_precision.param_dtype is not None and self._casts_inputs(is_root):
            args, kwargs = map_tensors(_cast_to(self.mixed_precision.param_dtype), (args, kwargs))
        state.calls.running += 1
        try:
            return self._fsdp_wrapped_module(*args, **kwargs)
        finally:
            state.calls.running -= 1

    def _casts_inputs(self, is_root: bool) -> bool:
        policy = self.mixed_precision
        if self._in_full_precision:
            return False
        return (is_root and policy.cast_root_forward_inputs) or (policy.cast_forward_inputs and self._has_params)

    @property
    def _has_params(self) -> bool:
        return bool(self._fsdp_state.places)

    def _prepare(self) -> None:
        """Of a root, before its first forward: what can be known only when all is wrapped."""
        instances = instances_below(self)
        refuse_optimizers_in_backward(self.parameters(), self._use_orig_params)
        for name in HOMOGENEOUS:
            values = {getattr(instance, name) for instance in instances}
            if len(values) > 1:
                raise ValueError(f"Expects one homogeneous value for {name} but got {values}")
        cast_buffers(self)
        self._is_prepared = True

    def _follow_training(self) -> None:
        """Of a root, before each forward: all below it evaluates in full precision."""
        in_full = not self.training
        if in_full is self._in_full_precision:
            return
        for instance in instances_below(self):
            _C.compute_in(instance._fsdp_state.unit, None if in_full else instance.mixed_precision.param_dtype)
            instance._in_full_precision = in_full
        (restore_buffers if in_full else cast_buffers)(self)

    _in_full_precision = False

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Applies ``fn`` to every module below and to this one, while their parameters are whole."""
        self._assert_state(TrainingState.IDLE)
        with summon(self, recurse=False):
            return super().apply(fn)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """While it lasts, the parameters of the wrappers in ``module`` are whole, in full precision. Collective."""
        with summon(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads):
            yield

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        instances = instances_below(self)
        for instance in instances:
            instance._fsdp_state.unit.reshard()
        result = super()._apply(*args, **kwargs)
        for instance in instances:
            instance._fsdp_state.follow()
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Within ``summon_full_params`` by the names that the unwrapped module has."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._listed_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Within ``summon_full_params`` by the names that the unwrapped module has."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._listed_name(name), buffer

    def _listed_name(self, name: str) -> str:
        return name.replace(FSDP_PREFIX, "") if self._summoned else name

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients are accumulated on each rank; the first backward after it reduces them."""
        if not self.check_is_root():
            raise RuntimeError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
            )
        self._assert_state(TrainingState.IDLE)
        changed = [instance for instance in instances_below(self) if instance._sync_gradients]
        _set_sync(changed, False)
        try:
            yield
        finally:
            _set_sync(changed, True)

    _sync_gradients = True

    def reset_iter_state(self) -> None:
        """After an exception in the middle of a forward or backward: forgets the broken step. Call it on the root, on all ranks."""
        self._fsdp_state.unit.reset_iter_state()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; returns that norm. Collective."""
        if not self.check_is_root():
            raise RuntimeError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        self._assert_state(TrainingState.IDLE)
        parameters = list(self.parameters())
        dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
        norm = clip_grad_norm_(parameters, max_norm, norm_type)
        if not dtypes:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning the total norm in the "
                f"default dtype {torch.float32}",
                stacklevel=2,
            )
            return norm.to(torch.float32)
        return norm.to(functools.reduce(torch.promote_types, dtypes))

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Gradients are reduced by ``hook(state, gradient, part)`` from now on, which is given a wrapper's whole flat
        gradient and leaves this rank's part of the result in ``part``; with ``NO_SHARD`` by ``hook(state, gradient)``."""
        if not self.check_is_root():
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        instances = instances_below(self)
        for instance in instances:
            if instance.sharding_strategy in HYBRID:
                raise AssertionError(
                    f"Communication hook is not supported for hybrid strategies: {instance.sharding_strategy}"
                )
            if instance._comm_hook is not None:
                raise AssertionError("A communication hook is already registered")
            if not callable(hook):
                raise ValueError(f"The communication hook must be callable but got {hook}")
        for instance in instances:
            instance._reduce_by(functools.partial(hook, state))

    _comm_hook: functools.partial | None = None

    def _reduce_by(self, hook: functools.partial) -> None:
        self._comm_hook = hook
        sharded = self.sharding_strategy is not ShardingStrategy.NO_SHARD
        _C.set_comm_hook(self._fsdp_state.unit, hook, sharded)
        if hook.func in LOW_PRECISION_HOOKS:
            _C.reduce_as_computed(self._fsdp_state.unit)

    def note_shard_writes(self) -> None:
        """Call it before this rank's parts are written by what no operator shows (numpy, a kernel of another library, an
        address). Not needed between the end of a backward and the next step. For the whole model. Collective."""
        self._fsdp_state.unit.note_shard_writes()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of the unwrapped module, with whole values. Collective."""
        with state_dicts.wholes_in_places(self):
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole values under the names of the unwrapped module. Collective."""
        try:
            return super().load_state_dict(*args, **kwargs)
        finally:
            state_dicts.end_loading(self)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """For the wrappers in a module; returns what it was before."""
        return state_dict_types.set_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        return state_dict_types.get_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """The same for a while."""
        return state_dict_types.type_for_a_while(module, state_dict_type, state_dict_config, optim_state_dict_config)

    optim_state_dict = staticmethod(optimizer_state_dicts.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer_state_dicts.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optimizer_legacy.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer_legacy.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optimizer_legacy.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optimizer_legacy.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer_legacy.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optimizer_legacy.rekey_optim_state_dict)

    def _fqn_modifiers(self) -> NoReturn:
        """Asked for by ``torch.distributed.checkpoint.state_dict`` alone, which would take parts for wholes."""
        raise NotImplementedError(
            "torch.distributed.checkpoint.state_dict does not know libfsdp's FullyShardedDataParallel: within "
            "FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT), or FULL_STATE_DICT, use model.state_dict() and "
            "FSDP.optim_state_dict(model, optimizer); for loading, model.load_state_dict() and "
            "FSDP.optim_state_dict_to_load()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """Wrapped in the same way, with the same values. Collective."""
        self._assert_state([TrainingState.IDLE, TrainingState.FORWARD_BACKWARD])
        twin = memo[id(self)] = type(self).__new__(type(self))
        nn.Module.__init__(twin)
        own = (vars(twin).keys() | {"_fsdp_state", "_ignored"}) - COPIED_OF_MODULES
        for name, value in vars(self).items():
            if name not in own:
                vars(twin)[name] = value if name in SHARED_BY_COPIES else copy.deepcopy(value, memo)
        module, twin._ignored = copy_wrapped(self, memo)
        twin._shard(module)
        _C.copy_settings(self._fsdp_state.unit, twin._fsdp_state.unit)
        if self._in_full_precision:
            _C.compute_in(twin._fsdp_state.unit, None)
        if self._comm_hook is not None:
            twin._reduce_by(self._comm_hook)
        copy_values(self._fsdp_state, twin._fsdp_state, memo)
        return twin

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: each rank holds only its part. Save model.state_dict(), whose values "
            "are whole"
        )


def _set_sync(instances: list[FullyShardedDataParallel], sync: bool) -> None:
    for instance in instances:
        instance._sync_gradients = sync
        instance._fsdp_state.unit.set_requires_gradient_sync(sync, False)
