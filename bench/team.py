"""Workers that wait for commands, so that contenders take turns: while one computes, the others sleep."""

import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time

TIMEOUT_SECONDS = 300


class Failed(Exception):
    pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    def __init__(self, command: list[str], environment: dict[str, object]):
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.replies: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                self.replies.put(json.loads(line.removeprefix("REPLY ")))
        self.replies.put(Failed("ended"))

    def send(self, request: dict) -> None:
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def reply(self, deadline: float):
        try:
            answer = self.replies.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            answer = Failed(f"gave no answer for {TIMEOUT_SECONDS} s")
        if isinstance(answer, Failed):
            raise Failed(f"{' '.join(self.process.args)[:200]}\n{answer}:\n{self.last_words()}")
        return answer

    def last_words(self) -> str:
        self.log.seek(0)
        return "".join(self.log.readlines()[-30:])

    def end(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Team:
    """The ranks of one contender, each a process."""

    def __init__(self, command: list[str], tasks: list[dict], environment: dict[str, object] | None = None):
        port, size = free_port(), len(tasks)
        self.workers = []
        for rank, task in enumerate(tasks):
            mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            self.workers.append(Worker([*command, json.dumps(task)], {**mine, **where, **(environment or {})}))

    def ready(self) -> "Team":
        self._replies()
        return self

    def ask(self, do: str, **arguments) -> list:
        """Every rank's answer."""
        for worker in self.workers:
            worker.send({"do": do, **arguments})
        return self._replies()

    def _replies(self) -> list:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        return [worker.reply(deadline) for worker in self.workers]

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers]

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_) -> None:
        for worker in self.workers:
            worker.end()
