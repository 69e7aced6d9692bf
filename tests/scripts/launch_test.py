"""scripts/launch with shell commands as ranks."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from processes import is_alive

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "launch"


def launch(ranks, command, **environment):
    return subprocess.Popen(
        [LAUNCH, "--ranks", str(ranks), "sh", "-c", command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Launch(unittest.TestCase):
    def run_to_end(self, ranks, command, **environment):
        process = launch(ranks, command, **environment)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def assert_gone(self, pids):
        deadline = time.monotonic() + 60
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual([pid for pid in pids if is_alive(pid)], [])

    def start_sleepers(self, ranks):
        """A launcher whose ranks sleep, each with a child that sleeps too; and the pids of them all."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        process = launch(ranks, f'sleep 100 & echo $$ $! >{folder.name}/$RANK.tmp; mv {folder.name}/$RANK.tmp '
                                f'{folder.name}/$RANK.pids; wait')
        self.addCleanup(process.communicate)
        deadline = time.monotonic() + 60
        while len(files := list(pathlib.Path(folder.name).glob("*.pids"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertEqual(len(files), ranks)
        return process, [int(pid) for file in files for pid in file.read_text().split()]

    def test_there_is_a_rank_for_each_gpu_that_programs_see_or_two(self):
        for visible, ranks in (("", 2), ("0", 1), ("4,5,6", 3)):
            command = [LAUNCH, "sh", "-c", "echo $WORLD_SIZE"]
            done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}, capture_output=True, text=True, timeout=30)
            self.assertEqual(done.stdout.split(), [str(ranks)] * ranks)

    def test_other_children_of_its_process_do_not_matter(self):
        command = f"sleep 0.3 & exec {LAUNCH} --ranks 2 sh -c 'sleep 0.6'"
        self.assertEqual(subprocess.run(["sh", "-c", command], timeout=30).returncode, 0)

    def test_ranks_get_what_torchrun_would_give_them(self):
        variables = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:+port}"
        status, out, _ = self.run_to_end(3, f"echo {variables}")
        self.assertEqual(status, 0)
        self.assertEqual(sorted(out.splitlines()), [f"{rank} {rank} 3 3 127.0.0.1 port" for rank in range(3)])

    def test_a_job_has_a_name_of_its_own(self):
        jobs = [set(self.run_to_end(3, "echo $FSDP_JOB_ID")[1].split()) for _ in range(2)]
        self.assertEqual([len(job) for job in jobs], [1, 1])
        self.assertNotEqual(*jobs)

    def test_nobody_else_is_given_the_port_but_rank_0_can_listen_there(self):
        listen = ("import os, socket; socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))", "ok")
        take = ("import os, socket; socket.socket().bind(('127.0.0.1', int(os.environ['MASTER_PORT'])))", "taken")
        for program, expected in (listen, take):
            _, out, _ = self.run_to_end(1, f'{sys.executable} -c "{program}" 2>&1 && echo ok || echo taken')
            self.assertEqual(out.split()[-1], expected)

    def test_cores_are_shared_out_unless_the_user_says_otherwise(self):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        ranks = 10 * len(os.sched_getaffinity(0))
        command = [LAUNCH, "--ranks", str(ranks), "sh", "-c", "echo $OMP_NUM_THREADS"]
        out = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
        self.assertEqual(set(out.split()), {"1"})
        self.assertEqual(set(self.run_to_end(2, "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="7")[1].split()), {"7"})

    def test_the_first_failure_ends_all_and_is_reported(self):
        started = time.monotonic()
        status, _, err = self.run_to_end(3, '[ "$RANK" = 1 ] && exit 7; exec sleep 100')
        self.assertEqual(status, 7)
        self.assertIn("rank 1 ended with status 7", err)
        self.assertLess(time.monotonic() - started, 20)

    def test_a_rank_that_is_killed_is_a_failure(self):
        status, _, err = self.run_to_end(2, '[ "$RANK" = 0 ] && kill -KILL $$; exec sleep 100')
        self.assertEqual(status, 128 + signal.SIGKILL)
        self.assertIn("rank 0 was ended by SIGKILL", err)

    def test_a_program_that_does_not_exist_is_named(self):
        result = subprocess.run([LAUNCH, "-n", "2", "/no/such/program"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 127)
        self.assertIn("/no/such/program", result.stderr)

    def test_signals_end_the_ranks_and_what_they_started(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process, pids = self.start_sleepers(2)
            process.send_signal(number)
            process.wait(timeout=20)
            self.assertEqual(process.returncode, 128 + number)
            self.assert_gone(pids)

    def test_ranks_that_ignore_the_signal_are_killed(self):
        process = launch(2, "trap '' TERM INT; echo ready; while :; do sleep 1; done")
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.send_signal(signal.SIGINT)
        self.assertIn("Ctrl-C again", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(timeout=20), 128 + signal.SIGINT)
        process.communicate()

    def test_ranks_may_take_their_time_to_end_after_ctrl_c(self):
        process = launch(2, "trap 'sleep 7; echo saved; exit' INT; sleep 100 & echo ready; wait")
        self.assertEqual([process.stdout.readline() for _ in range(2)], ["ready\n"] * 2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        self.assertEqual(out, "saved\n" * 2)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)

    def test_ranks_may_take_their_time_to_end_after_sigterm(self):
        process = launch(2, "trap 'sleep 7; echo saved; exit' TERM; sleep 100 & echo ready; wait")
        self.assertEqual([process.stdout.readline() for _ in range(2)], ["ready\n"] * 2)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        self.assertEqual(out, "saved\n" * 2)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)

    def test_sigusr1_is_for_the_ranks(self):
        process = launch(2, "trap 'echo saved; exit 0' USR1; sleep 100 & echo ready; wait")
        self.assertEqual([process.stdout.readline() for _ in range(2)], ["ready\n"] * 2)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=30)
        self.assertEqual((process.returncode, out, err), (0, "saved\n" * 2, ""))

    def test_ctrl_c_while_ranks_start_loses_none(self):
        for _ in range(5):
            process = launch(20, "sleep 100 & echo ready; wait")
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)  # whoever lives on holds the pipe
            self.assertEqual(process.returncode, 128 + signal.SIGINT)

    def test_nohup_keeps_the_ranks_from_a_hangup(self):
        command = f"trap '' HUP; exec {LAUNCH} --ranks 2 sh -c 'sleep 100 & echo ready; wait'"
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
        self.assertEqual([process.stdout.readline() for _ in range(2)], ["ready\n"] * 2)
        process.send_signal(signal.SIGHUP)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.terminate()
        process.communicate(timeout=20)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)

    def test_ctrl_c_reaches_ranks_of_a_launcher_in_the_background(self):
        command = f"trap '' INT; exec {LAUNCH} --ranks 2 sh -c 'echo ready; exec sleep 100'"  # as a shell's & does
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
        self.assertEqual([process.stdout.readline() for _ in range(2)], ["ready\n"] * 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)

    def test_ranks_may_take_their_time_though_nobody_reads_the_launcher(self):
        process = launch(1, "trap 'sleep 7; echo saved; exit' INT; sleep 100 & echo ready; wait")
        self.assertEqual(process.stdout.readline(), "ready\n")
        process.stderr.close()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.read(), "saved\n")
        self.assertEqual(process.wait(timeout=20), 128 + signal.SIGINT)
        process.stdout.close()

    def test_orphans_are_collected(self):
        orphan = "(sleep 0.2 & echo $!); sleep 1; echo done; exec sleep 100"
        program = f"import ctypes, os; ctypes.CDLL(None).prctl(36, 1); os.execv({str(LAUNCH)!r}, ['launch', '--ranks', '1', 'sh', '-c', {orphan!r}])"
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        pid = int(process.stdout.readline())
        self.assertEqual(process.stdout.readline(), "done\n")
        deadline = time.monotonic() + 60
        while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertFalse(pathlib.Path(f"/proc/{pid}").exists())
        process.terminate()
        process.communicate(timeout=20)

    def test_no_rank_outlives_a_launcher_that_is_killed(self):
        process, pids = self.start_sleepers(2)
        ranks, children = pids[::2], pids[1::2]
        process.kill()
        self.assert_gone(ranks)
        for pid in children:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    from results import run

    run()
