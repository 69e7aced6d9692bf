"""Runs the calling file's unittest cases; FSDP_RESULTS names the file that gets one entry a case, as GoogleTest writes it."""

import os
import sys
import unittest
import xml.etree.ElementTree as ElementTree


class RecordingResult(unittest.TextTestResult):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.entries = {}

    def startTest(self, test):
        super().startTest(test)
        self.entries[test.id()] = ElementTree.Element("testcase", name=test.id(), status="run")

    def mark(self, test, kind, message=""):
        printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(message))  # XML takes no others
        ElementTree.SubElement(self.entries[test.id()], kind, message=printable)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.mark(test, "failure", error[1])

    def addError(self, test, error):
        super().addError(test, error)
        self.mark(test, "failure", error[1])

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.mark(test, "skipped", reason)


def write_results(path, entries):
    root = ElementTree.Element("testsuites")
    root.extend(entries)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    ElementTree.ElementTree(root).write(path)


def run():
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    result = unittest.TextTestRunner(resultclass=RecordingResult, verbosity=2).run(suite)
    if "FSDP_RESULTS" in os.environ:
        write_results(os.environ["FSDP_RESULTS"], result.entries.values())
    sys.exit(0 if result.wasSuccessful() else 1)
