#!/usr/bin/env python3
"""count_tests.py DIR: prints what failed and `N passed, N failed` for the results in DIR; fails unless all passed.

DIR/ctest.xml has one entry a test program. A GoogleTest program also leaves DIR/<name>.xml, with its cases; a program that
died before it could write that file, or that ended badly though its cases passed, counts as one failure.
"""

import pathlib
import sys
import textwrap
import xml.etree.ElementTree as ElementTree

LINES_OF_A_FAILURE = 12


def describe(case):
    """A failed case as it is looked for in the log, and why it failed."""
    name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
    reasons = (failure.get("message", "") for failure in case.iter("failure"))
    return "\n".join([name, *textwrap.indent("\n".join(reasons), "  ").splitlines()[:LINES_OF_A_FAILURE]])


def look_at_cases(path):
    """The number of cases that passed and of those that were skipped, and what failed, of one GoogleTest program."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = [describe(case) for case in cases if case.find("failure") is not None]
    skipped = sum(case.find("skipped") is not None or case.get("status") == "notrun" for case in cases)
    return len(cases) - len(failed) - skipped, skipped, failed


def look_at_program(program, directory):
    if program.get("status") == "disabled":
        return 0, 1, []
    ended_well = program.get("status") == "run"
    try:
        passed, skipped, failed = look_at_cases(directory / f"{program.get('name')}.xml")
    except (OSError, ElementTree.ParseError):
        passed, skipped, failed = int(ended_well), 0, []
    if not ended_well and not failed:
        failed = [f"{program.get('name')} ended badly"]
    return passed, skipped, failed


def main(directory):
    report = directory / "ctest.xml"
    if not report.exists():
        sys.exit(f"{report} is missing: no test was run")
    programs = [look_at_program(program, directory) for program in ElementTree.parse(report).getroot().iter("testcase")]
    passed = sum(program[0] for program in programs)
    skipped = sum(program[1] for program in programs)
    failed = [case for program in programs for case in program[2]]
    for case in failed:
        print(f"FAILED {case}")
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {len(failed)} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
