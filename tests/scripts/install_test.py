"""What `cmake --install` and `cpack` put where, and what a project is told whose LibTorch is another."""

import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import unittest

import results

BUILD = pathlib.Path(os.environ["FSDP_BUILD"]).resolve()
CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, **options):
    return subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


class Installation(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.scratch = pathlib.Path(cls.folder.name)
        cls.root = cls.scratch / "root"
        installed = run(
            "cmake", "--install", BUILD, "--prefix", "/opt/fsdp", env={**os.environ, "DESTDIR": str(cls.root)}
        )
        assert installed.returncode == 0, installed.stdout
        cls.prefix = cls.root / "opt/fsdp"

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def library(self):
        return next(self.prefix.glob("lib*/**/libfsdp.so"))

    def test_it_goes_below_destdir_only(self):
        self.assertEqual([entry.name for entry in self.root.iterdir()], ["opt"])

    def test_headers_library_package_and_programs_are_there(self):
        self.assertTrue((self.prefix / "include/fsdp/fsdp.h").is_file())
        self.assertTrue(self.library().is_file())
        self.assertTrue(next(self.prefix.glob("lib*/**/cmake/fsdp")).joinpath("fsdpConfig.cmake").is_file())
        self.assertIn("--ranks", run(self.prefix / "bin/fsdp-launch", "--help").stdout)
        self.assertIn("fsdp-report", run(self.prefix / "bin/fsdp-report", "--help").stdout)

    def test_the_library_leads_to_no_checkout(self):
        dynamic = run("readelf", "-d", self.library()).stdout
        self.assertIn("libtorch_cpu", dynamic)
        self.assertNotRegex(dynamic, "RPATH|RUNPATH")

    def configure(self, version):
        """A project that uses the installation and finds a LibTorch of this version."""
        project = self.scratch / f"project-{version}"
        package = project / "torch/share/cmake/Torch"
        package.mkdir(parents=True)
        (package / "TorchConfigVersion.cmake").write_text(
            f'set(PACKAGE_VERSION "{version}")\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n'
        )
        (package / "TorchConfig.cmake").write_text(
            "foreach(name torch torch_library c10)\n  add_library(${name} INTERFACE IMPORTED)\nendforeach()\n"
        )
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\nproject(user LANGUAGES CXX)\nfind_package(fsdp REQUIRED)\n"
        )
        prefixes = f"{self.prefix};{project}/torch"
        return run("cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={prefixes}")

    def test_a_project_with_another_torch_is_told(self):
        result = self.configure("1.2.3")
        self.assertNotEqual(result.returncode, 0)
        self.assertRegex(" ".join(result.stdout.split()), r"built with LibTorch 2\.\d+, but .* LibTorch 1\.2\.3")

    def test_a_project_with_the_same_torch_is_configured(self):
        config = next(self.prefix.glob("lib*/**/fsdpConfig.cmake")).read_text()
        built_with = re.search(r"built with LibTorch (\d+\.\d+)", config).group(1)
        result = self.configure(f"{built_with}.99")
        self.assertEqual(result.returncode, 0, result.stdout)


class Packages(unittest.TestCase):
    def test_an_archive_and_a_debian_package(self):
        with tempfile.TemporaryDirectory() as folder:
            made = run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", folder)
            self.assertEqual(made.returncode, 0, made.stdout)
            archive = next(pathlib.Path(folder).glob("*.tar.gz"))
            with tarfile.open(archive) as opened:
                names = opened.getnames()
            for name in ("include/fsdp/fsdp.h", "bin/fsdp-launch"):
                self.assertTrue(any(entry.endswith(name) for entry in names), name)
            package = next(pathlib.Path(folder).glob("*.deb"))
            self.assertRegex(package.name, r"^libfsdp_[0-9.]+_\w+\.deb$")


if __name__ == "__main__":
    results.run()
