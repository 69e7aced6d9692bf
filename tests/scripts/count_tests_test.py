"""count_tests.py on results written for the purpose."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "count_tests.py"
TWO_PASSED = '<testsuites><testsuite><testcase status="run"/><testcase status="run"/></testsuite></testsuites>'
ONE_FAILED = '<testsuites><testcase status="run"/><testcase status="run"><failure/></testcase></testsuites>'
NAMED = (
    '<testsuites><testsuite><testcase classname="Ranks" name="Meet" status="run">'
    '<failure message="meet_test.cpp:7&#x0A;2 came"/></testcase></testsuite></testsuites>'
)
ONE_SKIPPED = '<testsuites><testcase status="run"/><testcase status="run"><skipped/></testcase></testsuites>'


class CountTests(unittest.TestCase):
    def count(self, programs, cases):
        """The last line and the code. programs: name -> ctest's status; cases: name -> GoogleTest's report."""
        lines, code = self.lines(programs, cases)
        return lines[-1], code

    def lines(self, programs, cases):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            entries = (f'<testcase name="{program}" status="{status}"/>' for program, status in programs.items())
            (folder / "ctest.xml").write_text(f"<testsuite>{''.join(entries)}</testsuite>")
            for program, report in cases.items():
                (folder / f"{program}.xml").write_text(report)
            result = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)
        return result.stdout.splitlines(), result.returncode

    def test_cases_of_all_programs_are_added(self):
        counted = self.count({"a": "run", "b": "run"}, {"a": TWO_PASSED, "b": TWO_PASSED})
        self.assertEqual(counted, ("4 passed, 0 failed", 0))

    def test_a_failed_case_fails(self):
        self.assertEqual(self.count({"a": "fail"}, {"a": ONE_FAILED}), ("1 passed, 1 failed", 1))

    def test_a_program_without_a_report_counts_as_one(self):
        self.assertEqual(self.count({"a": "run"}, {}), ("1 passed, 0 failed", 0))
        self.assertEqual(self.count({"a": "fail", "b": "run"}, {"b": TWO_PASSED}), ("2 passed, 1 failed", 1))

    def test_a_program_that_ended_badly_fails_though_its_cases_passed(self):
        self.assertEqual(self.count({"a": "fail"}, {"a": TWO_PASSED}), ("2 passed, 1 failed", 1))

    def test_a_program_that_died_while_it_wrote_its_report_fails(self):
        self.assertEqual(self.count({"a": "fail"}, {"a": "<testsuites><test"}), ("0 passed, 1 failed", 1))

    def test_a_program_that_was_not_built_fails(self):
        self.assertEqual(self.count({"a": "notrun"}, {}), ("0 passed, 1 failed", 1))

    def test_what_failed_is_named_with_the_reason(self):
        lines, _ = self.lines({"a": "fail", "b": "fail"}, {"a": NAMED, "b": TWO_PASSED})
        told = ["FAILED Ranks.Meet", "  meet_test.cpp:7", "  2 came", "FAILED b ended badly", "2 passed, 2 failed"]
        self.assertEqual(lines, told)

    def test_skipped_cases_are_neither(self):
        self.assertEqual(self.count({"a": "run"}, {"a": ONE_SKIPPED}), ("1 passed, 0 failed", 0))

    def test_no_test_at_all_fails(self):
        self.assertEqual(self.count({}, {}), ("0 passed, 0 failed", 1))


if __name__ == "__main__":
    from results import run

    run()
