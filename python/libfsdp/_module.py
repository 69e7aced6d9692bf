"""The methods that a sharded module has."""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from ._copy import copy_sharded
from ._state import FSDPState, state_of, states_below


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Waits for an asynchronous ``unshard``. Not needed before a forward, which waits by itself."""

    def __init__(self, handle: _C.UnshardHandle):
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()


def _as_plain_event(event: torch.Event, device: torch.device) -> torch.Event:
    """What the engine can wait for. ``torch.cuda.Event`` and its like keep what they recorded to themselves, so a stream
    beside the others waits for them, and says when it has."""
    stream = torch.get_device_module(device).Stream(device=device)
    event.wait(stream)
    return stream.record_event(torch.Event(device=device))


def _collective(comm: Callable, mesh: DeviceMesh, **reduction: Any) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One that users bring, as the engine calls it."""
    group = mesh.get_group(mesh.ndim - 1)

    def run(output: torch.Tensor, input: torch.Tensor) -> None:
        work = comm(output_tensor=output, input_tensor=input, group=group, async_op=False, **reduction)
        if work is not None:
            work.wait()

    return run


def _units(modules: Iterable[Any]) -> list[_C.Unit]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}. Call fully_shard on it first")
    return [module._get_fsdp_state().unit for module in modules]


class FSDPModule(torch_fsdp.FSDPModule):
    """What ``fully_shard`` adds to a module's class. ``recurse`` means: also the sharded modules below."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A part of a sharded container (a slice of a Sequential) is a container of the original class.
        original = cls._original_class
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(self)
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self)}: make the module with fully_shard")
        return state

    def _below(self, recurse: bool) -> list[_C.Unit]:
        return [state.unit for state in self._states_below(recurse)]

    def _states_below(self, recurse: bool) -> list[FSDPState]:
        return states_below(self) if recurse else [self._get_fsdp_state()]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Makes the parameters whole until ``reshard``; once they were used, they are freed as always.

        Not recursive. Returns a handle if ``async_op``.
        """
        handle = UnshardHandle(self._get_fsdp_state().unit.unshard(async_op))
        return handle if async_op else None

    def reshard(self) -> None:
        """Frees the whole parameters, unless ``summon_full_params`` shows them. Not recursive."""
        self._get_fsdp_state().unit.reshard()

    def note_shard_writes(self) -> None:
        """Call it before shards are written by what no operator shows (numpy, a kernel of another library, an address).

        Not needed between the end of a backward and the next step, where optimizers write. For the whole model. Collective.
        """
        self._get_fsdp_state().unit.note_shard_writes()

    def reset_iter_state(self) -> None:
        """After an exception in the middle of a forward or backward: forgets the broken step. Call it on the root."""
        self._get_fsdp_state().unit.reset_iter_state()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the next backward leaves reductions running, for a later backward to wait for."""
        self._get_fsdp_state().unit.set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients accumulate unsharded, without communication."""
        for unit in self._below(recurse):
            unit.set_requires_gradient_sync(requires_gradient_sync, False)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: on hybrid meshes gradients are reduce-scattered, and all-reduced later."""
        for unit in self._below(recurse):
            unit.set_requires_all_reduce(requires_all_reduce, False)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether whole parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for unit in self._below(recurse):
            unit.set_reshard_after_forward(reshard_after_forward, False)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether whole parameters are freed after backward."""
        for unit in self._below(recurse):
            unit.set_reshard_after_backward(reshard_after_backward, False)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Modules to gather when this one is reached in forward, in place of what the schedule expects."""
        self._get_fsdp_state().unit.set_modules_to_forward_prefetch(_units(modules))

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Modules to gather when this one is reached in backward, in place of what the schedule expects."""
        self._get_fsdp_state().unit.set_modules_to_backward_prefetch(_units(modules))

    def set_custom_all_gather(self, comm: Callable) -> None:
        """Gathers through ``comm(output_tensor, input_tensor, group, async_op)``. Collective."""
        state = self._get_fsdp_state()
        mesh = state.only_parallel("set_custom_all_gather").mesh
        state.unit.set_custom_all_gather(_collective(comm, mesh))
        state.collective_settings["set_custom_all_gather"] = {"comm": comm}

    def set_custom_reduce_scatter(self, comm: Callable) -> None:
        """Reduces through ``comm(output_tensor, input_tensor, group, op, async_op)``."""
        state = self._get_fsdp_state()
        mesh = state.only_parallel("set_custom_reduce_scatter").mesh
        state.unit.set_custom_reduce_scatter(_collective(comm, mesh, op=dist.ReduceOp.SUM))
        state.collective_settings["set_custom_reduce_scatter"] = {"comm": comm}

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """``hook`` is given the reduced gradient shards before they reach the parameters: one flat tensor for each dtype
        in which they are reduced, to be changed in place. None: no hook."""
        state = self._get_fsdp_state()
        parallel = state.only_parallel("set_all_reduce_hook")
        if stream is not None and parallel.engine.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP, which all-reduces by itself")
        state.unit.set_all_reduce_hook(hook, stream)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """The next gathers wait for this event instead of for all work on the current stream. Root only. On the CPU, whose
        streams record None, there is nothing to wait for."""
        state = self._get_fsdp_state()
        if event is None and state.device.type == "cpu":
            event = torch.Event(device="cpu")
        if isinstance(event, torch.Event) and type(event) is not torch.Event and state.device.type != "cpu":
            event = _as_plain_event(event, state.device)
        state.unit.set_post_optim_event(event)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Gradients are divided by ``factor`` instead of by the number of ranks (None). Not recursive."""
        self._get_fsdp_state().unit.set_gradient_divide_factor(factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Reductions only ever sum; libfsdp's always do."""
        self._get_fsdp_state().unit.set_force_sum_reduction_for_comms(enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: trainable parameters without a gradient take part in the reduction as zeros."""
        for unit in self._below(recurse):
            unit.set_reduce_scatter_unused_params(reduce_scatter_unused_params, False)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many units' gradients may be in flight at once; shared by all units below a root."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for unit in self._below(recurse):
            unit.set_reduce_scatter_max_input_buffers(max_input_buffers, False)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reductions use a communicator of their own, so that they do not queue behind gathers. Collective."""
        for state in self._states_below(recurse):
            state.unit.set_separate_reduce_scatter_group(enable, False)
            state.collective_settings["set_separate_reduce_scatter_group"] = {"enable": enable, "recurse": False}

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not prefetch this module (an embedding's backward needs no weight)."""
        self._get_fsdp_state().unit.set_unshard_in_backward(unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """False is what there is: whole parameters give their memory back when they are resharded."""
        if keep:
            raise NotImplementedError(
                "set_keep_unsharded_storage(True) is not supported: libfsdp's units take turns in the memory of whole "
                "parameters; unshard() and set_reshard_after_backward(False) keep a unit whole"
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Buffers for collectives come from the process group's backend, if it has memory of its own (NCCL), for all modules
        that share the group."""
        state = self._get_fsdp_state()
        try:
            state.unit.set_allocate_memory_from_process_group_for_comm(enable)
        except _C.Error as error:
            raise AssertionError(str(error)) from None
        state.collective_settings["set_allocate_memory_from_process_group_for_comm"] = {"enable": enable}

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Not there: libfsdp has its own shared memory on one host, and leaves NCCL's to NCCL."""
        raise NotImplementedError(
            f"set_symm_mem_for_comm({backend!r}): libfsdp does not use symmetric memory; leave the call out"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        result = super(torch_fsdp.FSDPModule, self)._apply(*args, **kwargs)
        self._get_fsdp_state().follow()
        return result

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        for state in states_below(self):
            state.follow()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy_sharded(self, memo)

    def __reduce_ex__(self, _protocol: int) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: each rank holds only its shards. Save model.state_dict() with "
            "torch.distributed.checkpoint, or whole parameters from within libfsdp.summon_full_params(model). For a "
            "sharded copy, copy.deepcopy(model)"
        )


def _refusal(name: str) -> Callable:
    def refuse(self: FSDPModule, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"libfsdp does not have FSDPModule.{name}, which torch {torch.__version__} has: leave the call out (what there "
            "is in its place, docs/python.md says)"
        )

    return refuse


NOT_HERE = [
    name
    for name, member in vars(torch_fsdp.FSDPModule).items()
    if callable(member) and not name.startswith("_") and name not in vars(FSDPModule)
]
"""What a newer PyTorch has, and would look for in a state of its own."""
for _name in NOT_HERE:
    setattr(FSDPModule, _name, _refusal(_name))

_classes: dict[type, type] = {}


def sharded_class(original: type) -> type:
    """``FSDP<Original>``: the class that takes the place of a sharded module's own."""
    if original not in _classes:
        members = {
            "_original_class": original,
            "_original_call": original.__call__,
            "__call__": _C.call_sharded,
            "__module__": original.__module__,
        }
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), members)
    return _classes[original]
