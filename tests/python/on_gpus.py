"""Runs the tests' bodies on GPUs: FSDP_TEST_DEVICE=cuda. What they make without a device lies on the GPU, their meshes for the
CPU are for it, and NCCL takes Gloo's place."""

import functools
import os

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

WANTED = os.environ.get("FSDP_TEST_DEVICE") == "cuda"
FILES = (
    "test_backwards test_forwards test_meshes test_on_gpus test_options test_parameters test_parity test_precision test_step "
    "test_whole_parameters test_fsdp1"
).split()
ABOUT_THE_HOST = (
    "test_a_process_group_written_in_python",  # over Gloo
    "test_a_flat_parameter_moves_to_memory_that_processes_share",  # which a GPU's storage always is in
    "test_a_model_whose_backward_is_to_come_is_used_within_another[",  # makes inputs on a thread of LibTorch's
    "test_autocast[",  # of the CPU
    "test_from_group[",  # of Gloo
    "test_hooks_that_change_what_is_saved",  # make values on the host
    "test_meta_device_and_a_checkpoint_in_pieces_for_shards_on_the_host",  # whose optimizer adds otherwise than the GPU's
    "test_meta_device_and_a_parameter_that_is_replaced",  # likewise
    "test_no_python_frame_of_ours_in_a_step",  # but one of what puts tensors onto the GPU
    "test_optimizer_states_where_ranks_ignore_other_modules",  # compares counts of steps, which lie on the host
    "test_writes_that_no_operator_shows_between_evaluations",  # by numpy
)


def is_for(file: str, name: str) -> bool:
    return file.startswith(tuple(FILES)) and (file == "test_on_gpus.py" or not name.startswith(ABOUT_THE_HOST))


def device() -> torch.device:
    """Where the tests' models are."""
    on_gpu = WANTED and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def share_one_gpu(rank: int, ranks: int) -> None:
    """NCCL refuses ranks of one host on one GPU, but not those that it takes for hosts of their own."""
    if torch.cuda.device_count() < ranks:
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def begin(store: dist.Store, rank: int, ranks: int) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    share_one_gpu(rank, ranks)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=ranks)
    _mesh_of_gpus.whole = dist.device_mesh.init_device_mesh
    dist.device_mesh.init_device_mesh = dist.init_device_mesh = _mesh_of_gpus
    torch.testing.assert_close = functools.partial(torch.testing.assert_close, check_device=False)  # offloaded ones
    MadeOnTheGpu().__enter__()


@functools.wraps(dist.device_mesh.init_device_mesh)
def _mesh_of_gpus(device_type, *args, **kwargs):
    return _mesh_of_gpus.whole("cuda" if device_type == "cpu" else device_type, *args, **kwargs)


class MadeOnTheGpu(TorchFunctionMode):
    """As ``torch.set_default_device("cuda")``, also for numbers of a generator on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            return function(*args, **kwargs).cuda()
        kwargs["device"] = torch.device("cuda", torch.cuda.current_device())
        return function(*args, **kwargs)
