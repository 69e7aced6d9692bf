"""FSDP_TRACE and fsdp-report on a run of examples/train_gpt."""

import json
import pathlib
import re
import subprocess
import tempfile
import unittest

import support

SMALL = ["--width", 32, "--layers", 2, "--heads", 2, "--seq", 32, "--batch", 2, "--sample", 0, "--steps", 4]
RANKS = 2


def report(*arguments):
    command = [str(word) for word in (support.BIN / "fsdp-report", *arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=support.PATIENCE)


class Trace(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        result = support.run(
            "train_gpt", *SMALL, "--out", cls.folder, ranks=RANKS, FSDP_TRACE=str(cls.folder / "trace.json")
        )
        assert result.returncode == 0, result.stdout + result.stderr
        cls.files = sorted(cls.folder.glob("trace.rank*.json"))

    def events(self, rank):
        return json.loads(self.files[rank].read_text())

    def test_a_file_for_each_rank(self):
        self.assertEqual([file.name for file in self.files], ["trace.rank0.json", "trace.rank1.json"])

    def test_each_unit_is_gathered_in_each_step(self):
        for rank in range(RANKS):
            gathered = [e["args"]["unit"] for e in self.events(rank) if e["name"] == "gather"]
            for unit in ("blocks.0", "blocks.1", "(root)"):
                self.assertGreaterEqual(gathered.count(unit), 4, f"rank {rank}, {unit}")

    def test_reductions_are_started_and_finished(self):
        names = [event["name"] for event in self.events(0)]
        self.assertEqual(names.count("start reduction"), names.count("finish reduction"))
        self.assertGreaterEqual(names.count("start reduction"), 3 * 4)

    def test_memory_stays_below_the_bound(self):
        counters = [event["args"] for event in self.events(0) if event["ph"] == "C"]
        self.assertTrue(counters)
        self.assertGreater(max(memory["gradients"] for memory in counters), 0)
        for memory in counters:
            self.assertLessEqual(memory["whole parameters"] + memory["gradients"], memory["bound"])

    def test_waits_name_the_other_rank(self):
        peers = {e["args"]["peer"] for rank in range(RANKS) for e in self.events(rank) if e["name"] == "wait for rank"}
        self.assertTrue(peers <= {0, 1})
        self.assertTrue(peers)

    def test_the_report_has_all_ranks_and_units(self):
        page = self.folder / "report.html"
        result = report("--output", page, *self.files)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(f"{RANKS} ranks", result.stdout)
        text = page.read_text()
        self.assertNotRegex(text, r"https?://")  # it needs no network
        data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))
        self.assertEqual([rank["rank"] for rank in data["ranks"]], [0, 1])
        self.assertTrue({"blocks.0", "blocks.1", "(root)"} <= set(data["names"]))
        spans = sum(len(rank["spans"]) for rank in data["ranks"])
        events = sum(event["ph"] == "X" for rank in range(RANKS) for event in self.events(rank))
        self.assertEqual(spans, events)
        waited = [unit["waited"] for unit in data["units"]]
        self.assertEqual(waited, sorted(waited, reverse=True))

    def test_the_trace_of_a_killed_rank_can_be_read_wherever_it_ends(self):
        cut = self.folder / "cut.json"
        lines = [line.replace("(root)", "[root]}") for line in self.files[0].read_text().splitlines()]
        spans = [line for line in lines if '"X"' in line and "[root]}" in line]
        before = "\n".join([*lines[:2], spans[0]])
        last = "\n" + spans[1]
        for length in range(len(last) + 1):
            with self.subTest(ends=last[:length]):
                cut.write_text(before + last[:length])
                result = report("--output", self.folder / "cut.html", cut)
                self.assertEqual(result.returncode, 0, result.stderr)

    def test_errors_say_what_to_do(self):
        self.assertIn("FSDP_TRACE", report().stderr)
        self.assertIn("no-such-file", report("no-such-file").stderr)
        other = self.folder / "other.json"
        other.write_text("{}")
        result = report(other)
        self.assertEqual(result.returncode, 1)
        self.assertIn("not a trace", result.stderr)
        self.assertIn("--output", report("--help").stdout)


if __name__ == "__main__":
    support.run_tests()
