"""What the benchmark concludes from samples."""

import pathlib
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

import results  # noqa: E402
import rows  # noqa: E402
import table  # noqa: E402


class Rows(unittest.TestCase):
    def test_a_ratio_is_that_of_one_turn(self):
        row = rows.times_better("a", "ms", [1, 2, 4], [3, 4, 20], target=2.5)
        self.assertEqual(row.runs["ratio"], [3, 2, 5])
        self.assertEqual((row.ours, row.theirs, row.ratio), (2, 4, 3))
        self.assertEqual(row.spread(), (2, 5))

    def test_targets_are_met_or_not(self):
        self.assertTrue(rows.times_better("a", "ms", [1], [3], target=3).met)
        self.assertFalse(rows.times_better("a", "ms", [1], [2.9], target=3).met)
        self.assertTrue(rows.at_most("a", "ms", [1.05], [1], target=1.05).met)
        self.assertFalse(rows.at_most("a", "ms", [1.06], [1], target=1.05).met)
        self.assertIsNone(rows.times_better("a", "ms", [1], [2], target=None).met)

    def test_every_turn_has_both_sides(self):
        with self.assertRaises(ValueError):
            rows.times_better("a", "ms", [1, 2], [3], target=1)

    def test_the_table_says_what_is_not_met(self):
        missed, met = rows.times_better("a", "ms", [1], [2], 3), rows.at_most("b", "ms", [1], [2], 1)
        self.assertIn("NOT MET", table.line(missed))
        self.assertIn(">= 3", table.line(missed))
        self.assertNotIn("NOT MET", table.line(met))
        self.assertEqual(table.summary([missed, met, rows.reported("c", "ns", [5])]), "1 of 2 targets met.")


if __name__ == "__main__":
    results.run()
