"""How a worker obeys the driver: the protocol of bench/serve.h."""

import json
import sys
from collections.abc import Callable


def serve(commands: dict[str, Callable[[dict], object]]) -> None:
    """Does what the driver asks for, a line of JSON each, until it closes the pipe."""
    print('REPLY "ready"', flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print("REPLY", json.dumps(commands[request["do"]](request)), flush=True)
