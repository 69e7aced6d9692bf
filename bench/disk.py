"""Checkpoints beside those of PyTorch's distributed checkpoint (DCP): a GPT on two ranks, with the state of AdamW.

Against DCP they go into a folder in memory: on a disk, both wait for the same disk most of the time. What the disk adds is a row of
its own."""

import contextlib
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

import memory
import rows
import steps
from team import Failed, Team

ROUNDS = 7
"""After one that does not count: memory that the machine has not used before takes several times as long, whoever asks for it."""
ROUNDS_ON_DISK = 3
IN_MEMORY = pathlib.Path("/dev/shm")
ROOM = 6 << 30
SAVES = ["ckpt_save_vs_dcp", "ckpt_async_stall_vs_dcp", "ckpt_load_vs_dcp", "export_peak_memory", "ckpt_save_vs_disk"]
RESHARDS = ["ckpt_reshard_2_to_4_vs_dcp"]
CONTENDERS = ("ours", "fsdp2")

Seconds = dict[str, list[float]]


@contextlib.contextmanager
def teams(ranks: int, build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[dict[str, Team]]:
    work = steps.Work(steps.Scenario("checkpoints", **steps.BIG, ranks=ranks), scratch)
    with contextlib.ExitStack() as stack:
        made = {}
        for name in CONTENDERS:
            say(f"checkpoints: {name} shards the model on {ranks} ranks")
            made[name] = stack.enter_context(work.team(name, build, "checkpoints")).ready()
            made[name].ask("start")
        yield made


def turns(what: str, say) -> Iterator[tuple[str, bool]]:
    """Whose turn it is, each being the first as often as not, and whether it counts."""
    for turn in range(ROUNDS + 1):
        for name in CONTENDERS[:: 1 if turn % 2 else -1]:
            say(f"checkpoints are {what}: {name}, " + (f"round {turn} of {ROUNDS}" if turn else "once before"))
            yield name, turn > 0


class Folder:
    """Of one contender's checkpoint, empty each time."""

    def __init__(self, above: pathlib.Path, name: str):
        self.path = above / name

    def emptied(self) -> str:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        return str(self.path)

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def seconds_of_dd(folder: Folder, size: int) -> float:
    """That as many bytes take, written and flushed."""
    path = folder.emptied()
    command = ["dd", "if=/dev/zero", f"of={path}/zeros", "bs=1M", f"count={size >> 20}", "conv=fsync", "status=none"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


@contextlib.contextmanager
def folders_in_memory(scratch: pathlib.Path) -> Iterator[dict[str, Folder]]:
    """Where there is room; else on the disk."""
    has_room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > ROOM
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if has_room else scratch) as above:
        yield {name: Folder(pathlib.Path(above), name) for name in (*CONTENDERS, "weights")}


def saves(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    saved: Seconds = {name: [] for name in CONTENDERS}
    stalled: Seconds = {name: [] for name in CONTENDERS}
    with folders_in_memory(scratch) as folders, teams(2, build, scratch, say) as of:
        allowed = max(of["ours"].ask("bytes_of_unit")) / memory.MIB + 64
        peak = peak_of_export(of["ours"], folders["weights"]) / memory.MIB
        for team in of.values():
            team.ask("step")
        for name, counts in turns("saved", say):
            seconds = max(of[name].ask("save", folder=folders[name].emptied()))
            stall = max(of[name].ask("save_async", folder=folders[name].emptied()))
            of[name].ask("wait")
            if counts:
                saved[name].append(seconds)
                stalled[name].append(stall)
        yield rows.times_better("ckpt_save_vs_dcp", "s", saved["ours"], saved["fsdp2"], 2.0)
        yield rows.times_better("ckpt_async_stall_vs_dcp", "s", stalled["ours"], stalled["fsdp2"], 5.0)
        loaded = loads(of, folders, "2 ranks", say)
        yield rows.times_better("ckpt_load_vs_dcp", "s", loaded["ours"], loaded["fsdp2"], 3.0)
        yield rows.at_most("export_peak_memory", "MiB", [peak], [allowed], 1.0)
        yield beside_the_disk(of["ours"], scratch, say)


def beside_the_disk(team: Team, scratch: pathlib.Path, say) -> rows.Row:
    ours, zeros = Folder(scratch, "ours"), Folder(scratch, "zeros")
    seconds: Seconds = {"ours": [], "dd": []}
    for turn in range(ROUNDS_ON_DISK):
        say(f"checkpoints are saved on the disk, round {turn + 1} of {ROUNDS_ON_DISK}")
        seconds["ours"].append(max(team.ask("save", folder=ours.emptied())))
        seconds["dd"].append(seconds_of_dd(zeros, ours.bytes()))
    for folder in (ours, zeros):
        folder.emptied()
    return rows.at_most("ckpt_save_vs_disk", "s", seconds["ours"], seconds["dd"], 1.2)


def loads(of: dict[str, Team], folders: dict[str, Folder], where: str, say) -> Seconds:
    """Of what was saved last. Afterwards both go on with the same loss."""
    seconds: Seconds = {name: [] for name in CONTENDERS}
    losses = {name: [] for name in CONTENDERS}
    for name, counts in turns(f"loaded on {where}", say):
        took = max(of[name].ask("load", folder=str(folders[name].path)))
        if counts:
            seconds[name].append(took)
        losses[name] += of[name].ask("step")
    if not all(map(steps.is_same_loss, losses["ours"], losses["fsdp2"])):
        raise Failed(f"after loading on {where}, the losses are {losses}")
    return seconds


def peak_of_export(team: Team, folder: Folder) -> int:
    """Memory of all ranks, above what is resident: of ranks that have not trained, whose freed memory would serve it."""
    path, resident = folder.emptied(), memory.pss(team.pids())
    return memory.peak_during(team, lambda: team.ask("export", folder=path)) - resident


def reshards(build: pathlib.Path, scratch: pathlib.Path, say) -> Iterator[rows.Row]:
    """What two ranks have saved is loaded by four, whose optimizers have made no step yet."""
    with folders_in_memory(scratch) as folders:
        with teams(2, build, scratch, say) as of:
            for name, team in of.items():
                team.ask("step")
                team.ask("save", folder=folders[name].emptied())
        with teams(4, build, scratch, say) as of:
            seconds = loads(of, folders, "4 ranks", say)
    yield rows.times_better("ckpt_reshard_2_to_4_vs_dcp", "s", seconds["ours"], seconds["fsdp2"], 3.0)


MEASUREMENTS = [(SAVES, saves), (RESHARDS, reshards)]
