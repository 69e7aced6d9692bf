"""scripts/setup.sh on machines that lack something, which stand-ins for the system's commands make believe."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import results

SETUP = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"
USED = ["bash", "cat", "cmake", "dirname", "g++", "mktemp", "python3", "rm", "sed", "touch"]


class Setup(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.commands = pathlib.Path(folder.name)
        for name in USED:
            if path := shutil.which(name):
                (self.commands / name).symlink_to(path)
        self.stand_in("id", "echo 1000")

    def stand_in(self, name, script):
        path = self.commands / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def setup(self, *arguments, **environment):
        return subprocess.run(
            [SETUP, *arguments], env={"PATH": str(self.commands), "HOME": os.environ.get("HOME", "/"), **environment},
            capture_output=True, text=True, timeout=60,
        )

    def test_without_root_one_line_says_what_to_install(self):
        result = self.setup(PYTHON=sys.executable)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"\Amissing packages\. Run:  sudo apt-get install -y [^\n]*ninja-build[^\n]*\n\Z")
        self.assertEqual(result.stdout, "")

    def test_root_installs_it(self):
        self.stand_in("id", "echo 0")
        self.stand_in("apt-get", f'echo "$@" >>{self.commands}/installed')
        self.setup("--tools", "no-such-tool")
        self.assertIn("install -y --no-install-recommends no-such-tool", (self.commands / "installed").read_text())

    def test_what_apt_says_is_shown_when_it_fails(self):
        self.stand_in("id", "echo 0")
        self.stand_in("apt-get", "echo no network >&2; exit 100")
        result = self.setup("--tools", "no-such-tool")
        self.assertEqual(result.returncode, 1)
        self.assertIn("no network", result.stderr)
        self.assertIn("apt-get could not install no-such-tool", result.stderr)

    def test_a_python_without_torch_is_named(self):
        for tool in ("ninja", "ccache"):
            self.stand_in(tool, "true")
        self.stand_in("python-without", f'case "$*" in *metadata*) exit 1;; esac; exec {sys.executable} "$@"')
        result = self.setup(PYTHON=str(self.commands / "python-without"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("python-without has no torch. Install it there, or leave PYTHON unset", result.stderr)


if __name__ == "__main__":
    results.run()
