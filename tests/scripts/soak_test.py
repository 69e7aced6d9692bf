"""soak.py on trials made for the purpose."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "soak.py"
SAYS_ITS_SEED = 'echo "$FSDP_TRIALS_SEED $FSDP_TRIALS" >> "$0.seeds"; sleep 0.2\n'
SIXTH_FAILS = 'seed=$((FSDP_TRIALS_SEED + 5)); echo "seed $seed: 2 ranks"; exit 1\n'


class Soak(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for folder in ("scripts", "build/tests"):
            (self.root / folder).mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / "scripts")

    def trials(self, body):
        self.binary = self.root / "build/tests/random_test"
        self.binary.write_text("#!/bin/sh\n" + body)
        self.binary.chmod(0o755)

    def soak(self, *arguments):
        command = [sys.executable, self.root / "scripts/soak.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def seeds(self):
        path = self.binary.with_name("random_test.seeds")
        lines = path.read_text().splitlines()
        path.unlink()
        return lines

    def test_trials_go_on_until_the_time_is_over(self):
        self.trials(SAYS_ITS_SEED)
        run = self.soak("--minutes", "0.05")
        self.assertEqual(run.returncode, 0, run.stderr)
        batches = len(self.seeds())
        self.assertGreater(batches, 1)
        self.assertIn(f"{40 * batches} trials, none failed", run.stdout)

    def test_a_seed_makes_the_same_trials_again(self):
        self.trials(SAYS_ITS_SEED)
        first = self.soak("--minutes", "0.01")
        seen, seed = self.seeds(), first.stdout.split("SEED=")[1].split(",")[0]
        self.soak("--minutes", "0.01", "--seed", seed)
        self.assertEqual(self.seeds()[0], seen[0])

    def test_a_trial_that_fails_is_named_and_may_be_repeated(self):
        self.trials(SAYS_ITS_SEED + SIXTH_FAILS)
        run = self.soak("--minutes", "5")
        failed = int(self.seeds()[0].split()[0]) + 5
        self.assertEqual(run.returncode, 1)
        self.assertIn(f"scripts/soak.py --only nn --seed {failed} --trials 1", run.stdout)
        again = self.soak("--only", "nn", "--seed", str(failed), "--trials", "1")
        self.assertEqual(again.returncode, 1)
        self.assertEqual(self.seeds(), [f"{failed} 1"])

    def test_without_a_build_it_says_so(self):
        run = self.soak("--minutes", "1")
        self.assertEqual(run.returncode, 1)
        self.assertIn("make build", run.stderr)


if __name__ == "__main__":
    from results import run

    run()
