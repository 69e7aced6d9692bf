#!/usr/bin/env python3
"""check_layers.py [ROOT]: proves that every file includes only what its layer may use.

A layer is a folder of src/. A public header belongs to the layer that implements it: the one with a .cpp of its name. A file may include its own layer, the
layers that LAYERS lists for it, and the public headers of all layers below. A backend is seen through its factories, and
examples, benchmarks and bindings see public headers only. The names of files in include/ and src/ differ.
"""

import pathlib
import re
import sys

# layer: the layers it may include, private headers too
LAYERS = {
    "base": [],
    "layout": ["base"],
    "comm": ["base"],
    "engine": ["base", "layout", "comm"],
    "nn": ["base", "engine"],
    "optim": ["base", "engine"],
    "state": ["base", "layout", "engine", "nn", "optim"],
    "fsdp1": ["base", "engine", "nn", "optim", "state"],
    "checkpoint": ["base", "layout", "engine", "state"],
}

# public header: the layer that implements it
PUBLIC = {
    "average": "nn",
    "call": "nn",
    "checkpoint": "nn",
    "clip_grad_norm": "optim",
    "clone": "nn",
    "cut": "base",
    "deferred_init": "nn",
    "describe": "nn",
    "error": "base",
    "export": "base",
    "extent": "layout",
    "front_end": "nn",
    "fsdp": "everything",
    "fully_shard": "nn",
    "fully_sharded_data_parallel": "fsdp1",
    "gather_extension": "engine",
    "group": "comm",
    "held": "engine",
    "init": "comm",
    "map_tensors": "base",
    "mesh": "comm",
    "module_ref": "base",
    "optim": "optim",
    "optim_state_dict": "state",
    "optim_state_forms": "state",
    "policy": "engine",
    "safetensors": "checkpoint",
    "save": "checkpoint",
    "save_async": "checkpoint",
    "saved_checkpoint": "checkpoint",
    "saved_state": "checkpoint",
    "sharded_grad_scaler": "optim",
    "sharded_tensor": "engine",
    "shown_shard": "engine",
    "state_dict": "state",
    "state_dict_type": "fsdp1",
    "summon": "nn",
    "trace": "base",
    "wrap": "nn",
}

# folder whose types nobody else sees: the headers through which it is reached from outside
BACKENDS = {
    "comm/c10d": ["factory.h"],
    "comm/shm": ["<fsdp/group.h>"],
}

# what a layer may not include at all: the engine serves other front ends than torch::nn and Python
FOREIGN = {"engine": re.compile(r"(torch/(torch|nn|extension|python)|Python|pybind11)[./]")}

# folders that are users of the library; and files in them that measure its insides, with the layer that they may see
OUTSIDE = ["examples", "bench", "python", "tools"]
INSIDE = {"bench/span.cpp": "base"}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
SOURCES = {".h", ".cpp", ".cc", ".cu"}


def below(layer):
    """All layers that `layer` rests on, directly or not."""
    direct = LAYERS[layer]
    return set(direct).union(*(below(lower) for lower in direct))


def sources(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in SOURCES)


def includes(path):
    """(line number, what it includes) of the includes that are the project's own."""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1)


class Checker:
    def __init__(self, root):
        self.root = root
        self.problems = []

    def complain(self, path, number, text):
        place = path.relative_to(self.root)
        self.problems.append(f"{place}:{number}: {text}" if number else f"{place}: {text}")

    def check_tables(self):
        for folder in sorted((self.root / "src").iterdir()):
            if folder.is_dir() and folder.name not in LAYERS:
                self.complain(folder, 0, "is no layer: give it a row in LAYERS")
        for header in sources(self.root / "include"):
            if header.stem not in PUBLIC:
                self.complain(header, 0, "belongs to no layer: give it a row in PUBLIC")
            for source in (self.root / "src").glob(f"*/{header.stem}.cpp"):
                if source.parent.name != PUBLIC.get(header.stem, source.parent.name):
                    self.complain(source, 0, f"implements a public header that belongs to {PUBLIC[header.stem]}")

    def check_names(self):
        public = {header.name for header in sources(self.root / "include")}
        for path in sources(self.root / "src"):
            if path.name in public:
                self.complain(path, 0, f"has the name of a public header, include/fsdp/{path.name}")

    def check_public_include(self, path, number, header, layer):
        owner = PUBLIC.get(pathlib.PurePath(header).stem)
        allowed = below(layer) | {layer}
        if owner is not None and owner not in allowed:
            wanted = ", ".join(sorted(allowed))
            self.complain(path, number, f"includes <fsdp/{header}> of {owner}; {layer} may use public headers of {wanted}")

    def check_private_include(self, path, number, target, layer):
        owner = target.split("/")[0]
        if owner in LAYERS and owner not in [layer, *LAYERS[layer]]:
            allowed = ", ".join(LAYERS[layer]) or "no other layer"
            self.complain(path, number, f'includes "{target}" of {owner}; {layer} may use {allowed}')

    def check_backend(self, path, number, target):
        for backend, doors in BACKENDS.items():
            inside = path.is_relative_to(self.root / "src" / backend)
            folder, _, name = target.rpartition("/")
            if folder == backend and not inside and name not in doors:
                self.complain(path, number, f'includes "{target}"; from outside, {backend} is reached through {", ".join(doors)}')

    def check_file(self, path, layer, is_public):
        for number, target in includes(path):
            if target.startswith("fsdp/"):
                if layer != "everything":
                    self.check_public_include(path, number, target.removeprefix("fsdp/"), layer)
            elif target.startswith("."):
                self.complain(path, number, f'includes "{target}"; write it from src/, as "layer/file.h"')
            elif is_public and target.split("/")[0] in LAYERS:
                self.complain(path, number, f'includes "{target}"; public headers include public headers only')
            elif layer in FOREIGN and FOREIGN[layer].match(target):
                self.complain(path, number, f"includes <{target}>; {layer} knows nothing of torch::nn and Python")
            elif layer != "everything":
                self.check_private_include(path, number, target, layer)
                self.check_backend(path, number, target)

    def check_outside(self, path):
        inside = INSIDE.get(path.relative_to(self.root).as_posix())
        for number, target in includes(path):
            owner = target.split("/")[0]
            if owner in LAYERS and owner != inside:
                self.complain(path, number, f'includes "{target}"; users of the library include <fsdp/...> only')

    def run(self):
        self.check_tables()
        self.check_names()
        for header in sources(self.root / "include"):
            self.check_file(header, PUBLIC.get(header.stem, "everything"), is_public=True)
        for layer in LAYERS:
            for path in sources(self.root / "src" / layer):
                self.check_file(path, layer, is_public=False)
        for folder in OUTSIDE:
            for path in sources(self.root / folder):
                self.check_outside(path)
        return self.problems


def main():
    default = pathlib.Path(__file__).resolve().parent.parent
    problems = Checker(pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else default).run()
    for problem in problems:
        print(problem)
    print(f"layers: {len(problems)} problems" if problems else "layers: every include is allowed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
