"""Looks at other processes."""

import pathlib


def is_alive(pid):
    """A process that has ended but was not waited for by its parent yet is not alive."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
