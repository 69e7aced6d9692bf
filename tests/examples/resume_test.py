"""Runs of examples/train_gpt that are killed, or asked to end, and go on."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

import support
from processes import is_alive  # of tests/scripts

SMALL = ["--width", 32, "--layers", 2, "--heads", 2, "--seq", 32, "--sample", 0, "--data", support.ROOT / "README.md"]
KILLS_ON_AS_MANY_RANKS = 20
KILLS_ON_OTHERS = 10


class Run:
    """A run that is started again and again. Its folder and its options stay."""

    def __init__(self, case, *options, ranks=2):
        folder = tempfile.TemporaryDirectory()
        case.addCleanup(folder.cleanup)
        self.case = case
        self.out = pathlib.Path(folder.name)
        self.checkpoints = self.out / "checkpoints"
        self.options = [*SMALL, "--out", self.out, *options]
        self.ranks = ranks

    def start(self, *options, ranks=None):
        process = subprocess.Popen(
            support.command("train_gpt", *self.options, *options, ranks=ranks or self.ranks),
            env=support.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.case.addCleanup(process.communicate)
        self.case.addCleanup(process.kill)
        return process

    def finish(self, *options, ranks=None):
        process = self.start(*options, ranks=ranks)
        out, err = process.communicate(timeout=support.PATIENCE)
        self.case.assertEqual(process.returncode, 0, out + err)
        return out

    def saving(self, every=1):
        return ["--save", self.checkpoints, "--save-every", every]

    def losses(self):
        """Of all steps of which it told, the last of which may be cut short."""
        steps = re.findall(r'^{.*"event":"step".*}$', (self.out / "metrics.jsonl").read_text(), re.M)
        return [json.loads(step)["loss"] for step in steps]

    def steps_saved(self):
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*"))

    def is_saving(self):
        return any(self.checkpoints.glob(".tmp-*"))


def wait_for(process, begin):
    """Until it prints a line that begins so."""
    for line in iter(process.stdout.readline, ""):
        if line.startswith(begin):
            return line
    raise AssertionError(f"ended before it printed '{begin}': " + process.stderr.read())


def wait_until(is_so):
    deadline = time.monotonic() + support.PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {support.PATIENCE} s")
        time.sleep(0.001)


def ranks_of(launcher):
    """The processes that it started, by rank."""
    pids = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    ranks = {}
    for pid in pids:
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks[int(next(value[5:] for value in environment if value.startswith(b"RANK=")))] = int(pid)
    return ranks


class Killed(unittest.TestCase):
    STEPS = 60

    def reference(self, *options):
        """The losses of a run that nobody disturbs, and the seconds that a step takes with its save."""
        run = Run(self, "--steps", self.STEPS, *options)
        process = run.start(*run.saving())
        wait_for(process, "step ")
        start = time.monotonic()
        self.assertIn("Saved: ", process.stdout.read())  # communicate() would leave out what wait_for has read beyond its line
        process.communicate(timeout=support.PATIENCE)
        self.assertEqual(len(run.losses()), self.STEPS)
        return run.losses(), (time.monotonic() - start) / self.STEPS

    def one_that_goes_on(self, run, options):
        """A new run if this one has saved its last step."""
        return Run(self, "--steps", self.STEPS, *options) if run.steps_saved()[-1:] == [self.STEPS] else run

    def kill_again_and_again(self, kills, options, ranks, compare):
        """A kill takes all ranks, somewhere between reading the latest checkpoint and the steps that follow."""
        expected, seconds = self.reference(*options)
        moments = random.Random(1)
        run = Run(self, "--steps", self.STEPS, *options)
        for kill in range(kills):
            run = self.one_that_goes_on(run, options)
            chosen = moments.choice(ranks)  # a run that begins on others has other batches
            process = run.start(*run.saving(), "--resume", ranks=chosen if run.steps_saved() else run.ranks)
            wait_for(process, "GPT with")
            time.sleep(moments.uniform(0, 8) * seconds)
            process.kill()
            process.communicate(timeout=support.PATIENCE)  # none of the ranks holds the pipe any more
            if (run.out / "metrics.jsonl").exists():
                compare(run.losses(), expected[: len(run.losses())], f"kill {kill}")
        run = self.one_that_goes_on(run, options)
        out = run.finish(*run.saving(), "--resume")
        self.assertIn("Saved: ", out)
        compare(run.losses(), expected, "the end")
        self.assertEqual(sorted(os.listdir(run.checkpoints))[0][:5], "step-", "what was half written is gone")

    def test_at_any_moment_runs_go_on_with_the_same_losses(self):
        self.kill_again_and_again(KILLS_ON_AS_MANY_RANKS, ["--batch", 2, "--dropout", 0.1], [2], self.assertEqual)

    def test_runs_go_on_on_other_numbers_of_ranks_with_losses_that_agree_to_rounding(self):
        def compare(ours, theirs, when):
            self.assertEqual(len(ours), len(theirs), when)
            for step, (our, their) in enumerate(zip(ours, theirs), start=1):
                self.assertAlmostEqual(our, their, delta=1e-5, msg=f"{when}, step {step}")

        self.kill_again_and_again(KILLS_ON_OTHERS, ["--batch", 6, "--lr", 2e-3], [1, 2, 3, 4], compare)

    def kill_one_while_saving(self, run):
        """Whether it was while saving: what was begun is still there."""
        process = run.start(*run.saving(), "--resume")
        wait_for(process, "step ")
        ranks = ranks_of(process)
        self.stop_while_saving(ranks[1], run)
        process.send_signal(signal.SIGSTOP)  # the others have all the time to say why they end
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, ranks.values())))
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=support.PATIENCE)
        self.assertRegex(err, r"train_gpt: rank 0: .*rank 1")
        self.assertRegex(err, r"train_gpt: rank 2: .*rank 1")
        self.assertNotEqual(process.returncode, 0)
        return run.is_saving()

    def stop_while_saving(self, pid, run):
        """A save that needs it no more ends meanwhile."""
        while True:
            wait_until(run.is_saving)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            if run.is_saving():
                return
            os.kill(pid, signal.SIGCONT)

    def test_one_rank_while_saving_ends_the_others_and_the_run_goes_on(self):
        options = ["--steps", 200, "--batch", 2]
        plain = Run(self, *options, ranks=3)
        plain.finish()
        for _ in range(20):
            run = Run(self, *options, ranks=3)
            if self.kill_one_while_saving(run):
                break
        else:
            self.fail("no kill came while it saved")
        run.finish(*run.saving(50), "--resume")
        self.assertEqual(run.losses(), plain.losses())


class Signals(unittest.TestCase):
    def assert_ends(self, run, process, status):
        """In order, after a step that is saved; and the run goes on."""
        out, err = process.communicate(timeout=support.PATIENCE)
        self.assertEqual((process.returncode, support.SLOW_RANKS.sub("", err)), (status, ""))
        step = run.steps_saved()[-1]
        self.assertEqual(step, len(run.losses()))
        self.assertIn(f"Stopped after {step} of 100000 steps, as asked", out)
        self.assertIn("The run is saved, and goes on with --resume.", out)
        out = run.finish("--save", run.checkpoints, "--resume", "--steps", step + 2)
        self.assertIn(f"Going on after step {step}, from {run.checkpoints}/step-", out)
        self.assertEqual(run.steps_saved(), [step, step + 2])

    def start(self, every):
        run = Run(self, "--steps", 100000, "--batch", 2)
        process = run.start(*run.saving(every))
        wait_for(process, "step ")
        return run, process

    def test_sigterm_saves_and_ends(self):
        run, process = self.start(every=0)
        process.send_signal(signal.SIGTERM)
        self.assert_ends(run, process, 128 + signal.SIGTERM)

    def test_sigusr1_saves_and_ends(self):
        run, process = self.start(every=1)
        process.send_signal(signal.SIGUSR1)
        self.assert_ends(run, process, 0)

    def test_one_rank_that_is_asked_tells_the_others(self):
        run, process = self.start(every=0)
        os.kill(ranks_of(process)[1], signal.SIGUSR1)
        self.assert_ends(run, process, 0)

    def test_without_a_folder_nothing_is_saved_and_the_end_says_so(self):
        run = Run(self, "--steps", 100000, "--batch", 2, ranks=1)
        process = run.start()
        wait_for(process, "step ")
        process.send_signal(signal.SIGUSR1)
        self.assertIn("Nothing is saved without --save DIR.", process.communicate(timeout=support.PATIENCE)[0])
        self.assertEqual(process.returncode, 0)

    def test_a_second_one_does_not_wait(self):
        run = Run(self, "--steps", 2, "--accumulate", 10**9, "--batch", 1, ranks=1)
        process = run.start()
        wait_for(process, "GPT with")
        while not (run.out / "metrics.jsonl").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        time.sleep(2.5)
        self.assertIsNone(process.poll())
        deadline = time.monotonic() + support.PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGTERM)  # one that comes soon after the first is taken for the same
            time.sleep(0.5)
        self.assertEqual(process.wait(timeout=1), -signal.SIGTERM)


class Folders(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.checkpoints = pathlib.Path(cls.folder.name, "checkpoints")
        cls.first = cls.run_to_end("--steps", 6, "--save-every", 2, "--resume")

    @classmethod
    def run_to_end(cls, *options, ranks=1):
        options = [*SMALL, "--batch", 4, "--out", cls.folder.name, "--save", cls.checkpoints, *options]
        return support.run("train_gpt", *options, ranks=ranks)

    def assert_refused(self, expected, *options, ranks=1):
        result = self.run_to_end(*options, ranks=ranks)
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertRegex(result.stderr, expected)

    def test_without_checkpoints_the_run_begins(self):
        self.assertEqual(self.first.returncode, 0, self.first.stderr)
        self.assertIn(f"No checkpoint in {self.checkpoints} yet: the run begins.", self.first.stdout)
        self.assertIn(f"Saved:   {self.checkpoints}/step-00000006", self.first.stdout)

    def test_only_the_last_are_kept(self):
        self.assertEqual(sorted(os.listdir(self.checkpoints)), ["step-00000004", "step-00000006"])

    def test_a_run_that_has_ended_goes_no_further(self):
        result = self.run_to_end("--steps", 6, "--resume")
        self.assertIn("Going on after step 6", result.stdout)
        before_and_after = re.compile("held-back text: .*")
        self.assertEqual(before_and_after.findall(result.stdout), before_and_after.findall(self.first.stdout))

    def test_another_runs_checkpoints_are_not_written_over(self):
        self.assert_refused("without checkpoints, got .*/step-00000006: add --resume to go on from there", "--steps", 9)

    def test_what_a_step_computes_does_not_change_on_the_way(self):
        self.assert_refused("expected --batch 4, with which the run began, got 3", "--resume", "--batch", 3)
        self.assert_refused("expected --seed 1, with which the run began, got 2", "--resume", "--seed", 2)
        self.assert_refused("expected the text that the run began with", "--resume", "--data", __file__)
        self.assert_refused("step-00000006.* has sizes .* in the model", "--resume", "--width", 64)

    def test_a_steps_sequences_are_divided_evenly(self):
        self.assert_refused("divides the run's 4 sequences per micro-batch, got 3", "--resume", ranks=3)


class Forms(unittest.TestCase):
    def test_a_run_goes_on_however_it_is_sharded(self):
        options = ["--steps", 6, "--batch", 2]
        first = Run(self, *options)
        first.finish(*first.saving(3))
        for form, ranks, delta in [
            (["--api", "fsdp1"], 2, 0), (["--offload"], 2, 0), (["--single", "--ranks", 2], 1, 0),
            (["--mesh", "2x2"], 4, 1e-5),
        ]:
            run = Run(self, *options, *form, ranks=ranks)
            shutil.copytree(first.checkpoints / "step-00000003", run.checkpoints / "step-00000003")
            self.assertIn("Going on after step 3", run.finish("--save", run.checkpoints, "--resume"))
            for our, their in zip(run.losses(), first.losses(), strict=True):
                self.assertAlmostEqual(our, their, delta=delta, msg=form)


class Options(unittest.TestCase):
    def test_checkpoints_need_a_folder(self):
        for option in ["--resume", "--save-every=3"]:
            result = support.run("train_gpt", option)
            self.assertEqual(result.returncode, 1)
            self.assertIn("expected --save DIR beside --resume and --save-every", result.stderr)

    def test_dropout_is_a_share(self):
        self.assertIn("expected less than 1 for --dropout", support.run("train_gpt", "--dropout", 1).stderr)


if __name__ == "__main__":
    support.run_tests()
