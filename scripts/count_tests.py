#!/usr/bin/env python3
"""count_tests.py DIR: prints `N passed, N failed` for the results in DIR and fails unless all passed.

DIR/ctest.xml has one entry a test program. A GoogleTest program also leaves DIR/<name>.xml, with its cases; a program that
died before it could write that file, or that ended badly though its cases passed, counts as one failure.
"""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def count_cases(path):
    """Passed, failed and skipped cases of one GoogleTest program."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None or case.get("status") == "notrun" for case in cases)
    return len(cases) - failed - skipped, failed, skipped


def count_program(program, directory):
    if program.get("status") == "disabled":
        return 0, 0, 1
    ended_well = program.get("status") == "run"
    cases = directory / f"{program.get('name')}.xml"
    try:
        passed, failed, skipped = count_cases(cases)
    except (OSError, ElementTree.ParseError):
        return (1, 0, 0) if ended_well else (0, 1, 0)
    return passed, failed if ended_well else max(failed, 1), skipped


def main(directory):
    report = directory / "ctest.xml"
    if not report.exists():
        sys.exit(f"{report} is missing: no test was run")
    counts = [count_program(program, directory) for program in ElementTree.parse(report).getroot().iter("testcase")]
    passed, failed, skipped = (sum(column) for column in zip(*counts)) if counts else (0, 0, 0)
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
