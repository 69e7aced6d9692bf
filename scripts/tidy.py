#!/usr/bin/env python3
"""tidy.py BUILD: runs clang-tidy on all of src/ as BUILD compiles it: many sources at a time, since nearly all the time goes
into LibTorch's headers. What was found clean is not looked at again until a source in it, a header of ours that it
includes, or .clang-tidy changes.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(rb'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


@functools.cache
def included_files(path):
    """The project's own headers that `path` includes itself."""
    names = (match.decode() for match in INCLUDE.findall(path.read_bytes()))
    candidates = (ROOT / folder / name for name in names for folder in ("src", "include"))
    return [candidate for candidate in candidates if candidate.is_file()]


def with_headers(path):
    found, waiting = set(), [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting.extend(included_files(file))
    return sorted(found)


def fingerprint(source):
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes())
    for file in with_headers(source):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_clean(source, build):
    stamp = build / "clean" / fingerprint(source)
    if stamp.exists():
        return True
    result = subprocess.run(["clang-tidy", "-p", build, "--quiet", source], capture_output=True, text=True)
    if result.returncode:
        print(f"{source}:\n{result.stdout}{result.stderr if not result.stdout else ''}", flush=True)
        return False
    stamp.parent.mkdir(exist_ok=True)
    stamp.touch()
    return True


def main(build):
    commands = json.loads((build / "compile_commands.json").read_text())
    sources = sorted({pathlib.Path(command["file"]) for command in commands})
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        clean = list(workers.map(lambda source: is_clean(source, build), sources))
    print(f"clang-tidy: {len(sources)} files of sources, {clean.count(False)} with findings")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
