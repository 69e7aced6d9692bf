"""check_layers.py on small trees made for the purpose."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "check_layers.py"


class CheckLayers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.write("include/fsdp/error.h", "#include <string>")
        self.write("src/base/env.cpp", '#include "base/env.h"\n#include <fsdp/error.h>\n#include <ATen/core/Tensor.h>')

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def problems(self):
        result = subprocess.run([sys.executable, SCRIPT, self.root], capture_output=True, text=True)
        lines = result.stdout.splitlines()[:-1]
        self.assertEqual(result.returncode, 1 if lines else 0, result.stdout + result.stderr)
        return lines

    def assert_one_problem(self, *parts):
        problems = self.problems()
        self.assertEqual(len(problems), 1, problems)
        for part in parts:
            self.assertIn(part, problems[0])

    def test_a_clean_tree_passes(self):
        self.write("src/engine/unit.cpp", '#include "layout/flat.h"\n#include "comm/world.h"\n#include <fsdp/group.h>')
        self.write("examples/a/main.cpp", "#include <fsdp/fsdp.h>")
        self.assertEqual(self.problems(), [])

    def test_a_lower_layer_must_not_include_a_higher_one(self):
        self.write("src/layout/flat.cpp", '// first line\n  #  include "engine/unit.h"')
        self.assert_one_problem("src/layout/flat.cpp:2", '"engine/unit.h"', "layout may use base")

    def test_neighbours_must_not_include_each_other(self):
        self.write("src/optim/adamw.cpp", '#include "nn/fully_shard.h"')
        self.assert_one_problem("src/optim/adamw.cpp:1", "of nn")

    def test_public_headers_belong_to_layers_too(self):
        self.write("src/layout/flat.cpp", "#include <fsdp/mesh.h>")
        self.assert_one_problem("<fsdp/mesh.h> of comm")

    def test_a_public_header_must_not_include_a_private_one(self):
        self.write("include/fsdp/mesh.h", '#include "base/env.h"')
        self.assert_one_problem("include/fsdp/mesh.h:1", "public headers include public headers only")

    def test_a_public_header_belongs_to_the_layer_of_its_source(self):
        self.write("include/fsdp/mesh.h", "")
        self.write("src/nn/mesh.cpp", "#include <fsdp/mesh.h>")
        self.assert_one_problem("src/nn/mesh.cpp", "belongs to comm")

    def test_the_engine_knows_no_front_end(self):
        self.write("src/engine/unit.cpp", "#include <torch/library.h>\n#include <torch/nn/module.h>")
        self.assert_one_problem("src/engine/unit.cpp:2", "torch/nn/module.h")

    def test_tools_are_users_of_the_library(self):
        self.write("tools/report/main.cpp", '#include "engine/unit.h"')
        self.assert_one_problem("tools/report/main.cpp:1", "<fsdp/...> only")

    def test_every_public_header_and_folder_needs_a_row(self):
        self.write("include/fsdp/unheard_of.h", "")
        self.write("src/unheard_of/a.cpp", "")
        self.assertEqual(len(self.problems()), 2)

    def test_no_name_is_both_public_and_private(self):
        self.write("src/base/error.h", "")
        self.assert_one_problem("src/base/error.h", "include/fsdp/error.h")

    def test_a_backend_is_reached_through_its_factory(self):
        self.write("src/comm/shm/core.cpp", '#include "comm/shm/futex.h"')
        self.write("src/comm/world.cpp", '#include "comm/c10d/factory.h"')
        self.assertEqual(self.problems(), [])
        self.write("src/comm/world.cpp", '#include "comm/c10d/channel.h"')
        self.assert_one_problem("src/comm/world.cpp:1", "reached through factory.h")
        self.write("src/comm/world.cpp", '#include "comm/shm/futex.h"')
        self.assert_one_problem("src/comm/world.cpp:1", "reached through <fsdp/group.h>")

    def test_users_see_public_headers_only(self):
        self.write("bench/span.cpp", '#include "base/tracing.h"')
        self.write("bench/step.cpp", '#include "engine/unit.h"')
        self.assert_one_problem("bench/step.cpp:1", "users of the library")

    def test_paths_start_at_the_layer(self):
        self.write("src/comm/world.cpp", '#include "../engine/unit.h"')
        self.assert_one_problem("src/comm/world.cpp:1", "layer/file.h")


if __name__ == "__main__":
    from results import run

    run()
