"""The numbered examples, run as their first lines say."""

import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import unittest

import support


def losses(output):
    return [float(number) for number in re.findall(r"loss ([0-9.e+-]+)", output)]


class SmallExamples(unittest.TestCase):
    def train(self, program, ranks, **environment):
        result = support.run(program, ranks=ranks, **environment)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assert_learned(result.stdout)
        return result.stdout

    def assert_learned(self, output):
        self.assertGreater(len(losses(output)), 3)
        self.assertLess(losses(output)[-1], 0.7 * losses(output)[0])

    def test_fully_shard(self):
        for ranks in (1, 2, 3):
            output = self.train("01_fully_shard", ranks)
            self.assertEqual(len(re.findall(r"rank \d keeps .* of 0.weight \[256, 64\]", output)), ranks)

    def test_torchrun_starts_ranks_too(self):
        python = os.environ.get("FSDP_TORCH_PYTHON")
        if not python:
            self.skipTest("FSDP_TORCH_PYTHON does not name a Python with torch")
        self.start_two(python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=2")

    def test_mpirun_starts_ranks_too(self):
        if not shutil.which("mpirun"):
            self.skipTest("there is no mpirun here")
        self.start_two("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")

    def start_two(self, *launcher):
        result = subprocess.run(
            [*launcher, support.BIN / "01_fully_shard"],
            env=support.environment(), capture_output=True, text=True, timeout=support.PATIENCE,
        )
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assert_both_keep_a_part(result.stdout)

    def assert_both_keep_a_part(self, output):
        self.assertEqual(len(re.findall(r"rank [01] keeps .* of 0.weight \[256, 64\]", output)), 2)

    def test_mpiexec_may_start_a_script_that_starts_the_rank(self):
        script = f'"{support.BIN / "01_fully_shard"}"; exit $?'
        ranks = [
            self.start(
                ["sh", "-c", script],
                PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2", FSDP_TIMEOUT="60",
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=support.PATIENCE) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], outputs)
        self.assert_both_keep_a_part("".join(output for output, _ in outputs))

    def test_a_rank_of_mpiexec_may_start_mpiexec(self):
        names = "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2"
        program = support.BIN / "01_fully_shard"
        script = f'{names.format(0)} "{program}" & first=$!; {names.format(1)} "{program}" && wait $first'
        inner = self.start(
            ["bash", "-c", script],
            PMI_RANK="0", PMI_SIZE="1", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="1", FSDP_TIMEOUT="60",
        )
        output, errors = inner.communicate(timeout=support.PATIENCE)
        self.assertEqual(inner.returncode, 0, output + errors)
        self.assert_both_keep_a_part(output)

    def test_ranks_of_mpiexec_may_start_as_many_each(self):
        """Whose launchers were given the variables of the rank that has started them."""
        names = "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2"
        program = support.BIN / "01_fully_shard"
        script = f'{names.format(0)} "{program}" & first=$!; {names.format(1)} "{program}" && wait $first'
        with tempfile.TemporaryDirectory() as folder:
            launcher = pathlib.Path(folder) / "hydra_pmi_proxy"
            launcher.symlink_to(shutil.which("bash"))
            outer = [
                self.start(
                    ["sh", "-c", f"{launcher} -c '{script}'; exit $?"],
                    PMI_RANK=str(rank), PMI_SIZE="2", MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS="2", FSDP_TIMEOUT="60",
                )
                for rank in range(2)
            ]
            outputs = [rank.communicate(timeout=support.PATIENCE) for rank in outer]
        self.assertEqual([rank.returncode for rank in outer], [0, 0], outputs)
        for output, _ in outputs:
            self.assert_both_keep_a_part(output)

    def test_mixed_precision_and_offload(self):
        output = self.train("02_mixed_precision_and_offload", 2)
        self.assertIn("bfloat16", output)
        self.assertIn("computed in c10::BFloat16", output)

    def test_hybrid_mesh(self):
        output = self.train("03_hybrid_mesh", 4)
        sums = re.findall(r"replica (\d), shard (\d): .* shard (\S+)", output)
        by_shard = {shard: {value for _, s, value in sums if s == shard} for _, shard, _ in sums}
        self.assertEqual(len(sums), 4)
        self.assertEqual([len(values) for values in by_shard.values()], [1, 1])

    def test_hybrid_mesh_says_how_many_ranks_it_needs(self):
        result = support.run("03_hybrid_mesh", ranks=1)
        self.assertEqual(result.returncode, 1)
        self.assertIn("even number of ranks", result.stderr)

    def test_fsdp1(self):
        for ranks in (1, 2, 3):
            output = self.train("05_fsdp1", ranks)
            kept = re.findall(r"rank \d keeps (\d+) numbers in blocks.0._flat_param", output)
            self.assertEqual([int(numbers) for numbers in kept], [math.ceil(8352 / ranks)] * ranks)
            self.assertIn("rank 0 has all 18 parameters, blocks.0.widen.weight among them: [128, 32]", output)

    def test_multi_host(self):
        """Two hosts with two ranks each, as two launchers would start them."""
        with socket.socket() as reserved:  # others who ask for a free port get another one
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            ranks = [self.start_rank(rank, reserved.getsockname()[1]) for rank in range(4)]
            outputs = [rank.communicate(timeout=support.PATIENCE) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * 4, outputs)
        self.assert_learned(outputs[0][0])
        for rank, (output, _) in enumerate(outputs):
            self.assertIn(f"rank {rank} of 4, number {rank % 2} on its host, talks over gloo", output)

    def start_rank(self, rank, port):
        return self.start(
            support.command("04_multi_host"),
            RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK=str(rank % 2), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )

    def start(self, command, **environment):
        process = subprocess.Popen(
            command, env=support.environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.addCleanup(process.kill)
        return process


if __name__ == "__main__":
    support.run_tests()
