"""examples/train_gpt as its users run it, with a model that takes moments."""

import json
import math
import os
import pathlib
import pty
import re
import signal
import socket
import subprocess
import tempfile
import unittest

import support

SMALL = ["--width", 32, "--layers", 2, "--heads", 2, "--seq", 32, "--batch", 2, "--sample", 20]
STEPS = 6


class Run:
    """One run's folder and what it left there."""

    def __init__(self, case, *options, ranks=1):
        folder = tempfile.TemporaryDirectory()
        case.addCleanup(folder.cleanup)
        self.out = pathlib.Path(folder.name)
        self.options = [*SMALL, "--out", self.out, *options]
        self.ranks = ranks

    def finish(self):
        return support.run("train_gpt", *self.options, ranks=self.ranks)

    def metrics(self):
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def losses(self):
        return [line["loss"] for line in self.metrics() if line["event"] == "step"]

    def report(self):
        return (self.out / "report.html").read_text()


class TrainGpt(unittest.TestCase):
    def finish(self, *options, ranks=1):
        run = Run(self, *options, ranks=ranks)
        result = run.finish()
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(support.SLOW_RANKS.sub("", result.stderr), "")
        return run

    def compare_with_single(self, ranks, *sharding, common=(), steps=STEPS):
        """The sharded run and the plain one, of the same batches."""
        sharded = self.finish("--steps", steps, *common, *sharding, ranks=ranks)
        single = self.finish("--steps", steps, *common, "--single", "--ranks", ranks)
        self.assertEqual(len(sharded.losses()), steps)
        self.assertEqual(single.metrics()[0]["units"], [])
        self.assertEqual(len(sharded.metrics()[0]["units"]), 3)  # two blocks and the root
        return sharded, single

    def assert_same_bits(self, ranks, *sharding, common=(), steps=STEPS):
        sharded, single = self.compare_with_single(ranks, *sharding, common=common, steps=steps)
        self.assertEqual(sharded.losses(), single.losses())
        for line in (0, -1):
            self.assertEqual(sharded.metrics()[line]["held_back_loss"], single.metrics()[line]["held_back_loss"])

    def assert_same_numbers(self, ranks, *sharding, common=()):
        """Where a sum is taken in another order than in one process, its last bit may differ."""
        for ours, theirs in zip(*(run.losses() for run in self.compare_with_single(ranks, *sharding, common=common))):
            self.assertAlmostEqual(ours, theirs, delta=1e-5)

    def test_one_rank_trains_as_plain_libtorch(self):
        self.assert_same_bits(1)

    def test_two_ranks_train_as_plain_libtorch(self):
        self.assert_same_bits(2)

    def test_three_ranks_train_as_plain_libtorch_though_nothing_divides_evenly(self):
        self.assert_same_bits(3)

    def test_gradients_accumulate_as_in_plain_libtorch(self):
        self.assert_same_bits(2, common=["--accumulate", 3])

    def test_clipping_takes_the_norm_of_the_whole_gradient(self):
        self.assert_same_bits(3, common=["--clip", 0.2])

    def test_without_clipping_as_well(self):
        self.assert_same_bits(3, common=["--clip", 0])

    def test_many_steps_do_not_drift_apart(self):
        self.assert_same_bits(2, steps=200)

    def test_hybrid_mesh_changes_no_numbers(self):
        self.assert_same_numbers(4, "--mesh", "2x2")

    def test_when_to_reshard_changes_no_numbers(self):
        self.assert_same_bits(2, "--reshard-after-forward", "false")

    def test_checkpointed_activations_change_no_numbers(self):
        self.assert_same_bits(2, "--checkpoint-activations")

    def test_offload_changes_no_numbers(self):
        self.assert_same_bits(2, "--offload")

    def test_both_interfaces_train_alike(self):
        self.assert_same_bits(3, "--api", "fsdp1")
        self.assert_same_bits(2, "--api", "fsdp1", "--reshard-after-forward", "false", common=["--accumulate", 2])
        self.assert_same_numbers(4, "--api", "fsdp1", "--mesh", "2x2")

    def test_gloo_changes_no_numbers(self):
        self.assert_same_bits(2, "--backend", "gloo")

    def test_resharding_to_fewer_ranks_changes_no_numbers(self):
        self.assert_same_bits(4, "--backend", "gloo", "--reshard-after-forward", 2)

    def test_the_seed_decides_the_run(self):
        first, again, other = (self.finish("--steps", 3, "--seed", seed, ranks=2).losses() for seed in (1, 1, 2))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def test_the_learning_rate_warms_up_and_then_follows_a_cosine(self):
        run = self.finish("--steps", 20, "--warmup", 4, "--lr", "1e-2")
        rates = [line["learning_rate"] for line in run.metrics() if line["event"] == "step"]
        for step, rate in enumerate(rates, start=1):
            along = math.cos(math.pi * (step - 1 - 4) / (20 - 4))
            expected = 1e-2 * step / 4 if step <= 4 else 1e-3 + (1e-2 - 1e-3) * (1 + along) / 2
            self.assertAlmostEqual(rate, expected, delta=1e-9, msg=f"step {step}")

    def test_the_end_says_what_was_learned_and_where_it_stands(self):
        run = Run(self, "--steps", STEPS, ranks=2)
        out = run.finish().stdout
        before, after = re.search(r"held-back text: (\S+) before, (\S+) after", out).groups()
        self.assertLess(float(after), float(before))
        self.assertRegex(out, r"The model writes:\n\nThe ")
        for name in ("report.html", "metrics.jsonl"):
            self.assertIn(str(run.out / name), out)
        self.assertRegex(out, r"unit +tensors +parameters +whole +per rank")  # the units, before the first step

    def test_a_terminal_gets_a_bar(self):
        run = Run(self, "--steps", STEPS)
        try:
            ours, theirs = pty.openpty()
        except OSError as error:  # a chroot without /dev/pts
            self.skipTest(f"no terminals here: {error}")
        process = subprocess.Popen(
            support.command("train_gpt", *run.options), env=support.environment(), stdout=theirs, close_fds=True
        )
        os.close(theirs)
        seen = b""
        while chunk := self.read(ours):
            seen += chunk
        self.assertEqual(process.wait(timeout=support.PATIENCE), 0)
        self.assertIn(b"\r\x1b[K[", seen)
        self.assertRegex(seen.decode(), r"\[=+\] 6/6  loss \S+  \S+ tok/s  \S+ MiB  0:00 left")

    def read(self, terminal):
        try:
            return os.read(terminal, 65536)
        except OSError:  # the other end was closed
            return b""

    def test_the_loss_falls(self):
        losses = self.finish("--steps", 60, "--warmup", 5, "--lr", "1e-2", ranks=2).losses()
        self.assertAlmostEqual(losses[0], 5.545, delta=0.1)  # of a model that knows nothing: the logarithm of 256
        self.assertLess(losses[-1], 3.5)

    def test_bfloat16_is_another_computation_that_learns_as_much(self):
        options = ["--steps", 40, "--warmup", 5, "--lr", "1e-2"]
        low = self.finish(*options, "--param-dtype", "bfloat16", "--reduce-dtype", "float32", ranks=2)
        full = self.finish(*options, ranks=2)
        self.assertNotEqual(low.losses(), full.losses())
        self.assertAlmostEqual(low.losses()[-1], full.losses()[-1], delta=0.1)
        self.assertIn("bfloat16", low.metrics()[0]["units"][0]["dtype"])

    def test_the_report_holds_the_run_and_asks_nothing_of_a_network(self):
        run = self.finish("--steps", STEPS, ranks=2)
        page = run.report()
        history = json.loads(re.search(r'<script type="application/json" id="history">(.*?)</script>', page, re.S)[1])
        self.assertEqual([step["loss"] for step in history["steps"]], run.losses())
        self.assertTrue(history["sample"].startswith("The "))
        self.assertEqual([unit["name"] for unit in history["units"]], ["(root)", "blocks.0", "blocks.1"])
        self.assertTrue(all(unit["bytes_whole"] > unit["bytes_shard"] > 0 for unit in history["units"]))
        self.assertTrue(all(step["memory_bytes"] > 0 and step["tokens_per_second"] > 0 for step in history["steps"]))
        self.assertNotRegex(page, r'(src|href)=|https?:|@import|fetch\(')

    def test_ctrl_c_ends_the_run_with_a_report(self):
        run = Run(self, "--steps", 100000, ranks=2)
        process = subprocess.Popen(
            support.command("train_gpt", *run.options, ranks=2),
            env=support.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.addCleanup(process.kill)
        lines = iter(process.stdout.readline, "")
        self.assertTrue(any(line.startswith("step") for line in lines))
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=support.PATIENCE)[0]
        self.assertIn("of 100000 steps, as asked", rest)
        self.assertTrue(run.metrics()[-1]["interrupted"])
        self.assertIn("</html>", run.report())

    def test_ranks_with_different_texts_are_told_so(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for rank in range(2):
            pathlib.Path(folder.name, f"{rank}.txt").write_text(f"text of rank {rank}. " * 1000)
        options = " ".join(map(str, SMALL))
        script = f"exec {support.BIN}/train_gpt {options} --out {folder.name} --data {folder.name}/$RANK.txt"
        result = subprocess.run(
            [support.LAUNCH, "--ranks", "2", "sh", "-c", script],
            env=support.environment(), capture_output=True, text=True, timeout=support.PATIENCE,
        )
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("expected the same text on all ranks, got another on rank 1", result.stderr)


class Options(unittest.TestCase):
    def assert_refused(self, expected, *options):
        result = support.run("train_gpt", *options)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, expected)

    def test_help_lists_every_option(self):
        result = support.run("train_gpt", "--help")
        self.assertEqual(result.returncode, 0)
        for name in ["data", "mesh", "reshard-after-forward", "checkpoint-activations", "single", "report"]:
            self.assertIn(f"--{name}", result.stdout)

    def test_an_unknown_option_is_an_error_with_a_suggestion(self):
        self.assert_refused("got --step: did you mean --steps?", "--step", 3)
        self.assert_refused("did you mean --accumulate?", "--acumulate=3")
        self.assert_refused("got --frobnicate: --help lists them", "--frobnicate")

    def test_a_bad_value_is_an_error_that_says_what_was_expected(self):
        self.assert_refused("expected a number from 1 up for --steps, got 'many'", "--steps", "many")
        self.assert_refused("expected replicas x shards for --mesh, as in 2x4, got '2by2'", "--mesh", "2by2")
        self.assert_refused("expected true, false or a number of ranks", "--reshard-after-forward", "maybe")
        self.assert_refused("expected one of bfloat16, float16, float32 for --param-dtype", "--param-dtype", "int4")
        self.assert_refused("expected a value after --steps, got none", "--steps")
        self.assert_refused("expected no value for --offload", "--offload=yes")
        self.assert_refused("multiple of twice the heads", "--width", 30, "--heads", 4)

    def test_options_that_contradict_each_other_are_refused(self):
        self.assert_refused("expected --single beside --ranks", "--ranks", 2)
        self.assert_refused("no --param-dtype", "--single", "--param-dtype", "bfloat16")

    def test_a_missing_text_is_an_error_that_names_it(self):
        self.assert_refused("got '/nowhere/text': choose another with --data", "--data", "/nowhere/text")

    def test_an_error_is_written_in_one_piece_which_other_ranks_errors_cannot_divide(self):
        pieces, stderr = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with pieces, stderr:
            command = support.command("train_gpt", "--data", "/nowhere/text")
            subprocess.run(command, env=support.environment(), stderr=stderr, timeout=support.PATIENCE)
            self.assertRegex(pieces.recv(1 << 16).decode(), r"\Atrain_gpt: .*choose another with --data FILE\n\Z")


if __name__ == "__main__":
    support.run_tests()
