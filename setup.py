"""Builds tpfused._C where a CUDA build of torch and its nvcc are there; elsewhere a pure-Python install."""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends do not put the project's folder there

from tpfused import extension  # noqa: E402  (imports no torch)

try:
    toolchain = extension.find_toolchain()
    pure_python_because = None
except extension.NotBuildable as reason:
    toolchain = None
    pure_python_because = str(reason)


class BuildExtension(build_ext):
    def run(self):
        self.in_tree = bool(self.inplace)  # an editable install, or `build_ext --inplace`; super clears it
        super().run()

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        extension.build(toolchain, target, Path(self.build_temp).resolve(), in_tree=self.in_tree)


class BuildPython(build_py):
    def run(self):
        super().run()
        if toolchain is None:
            print(f"tpfused: pure-Python install, without the compiled extension: {pure_python_because}")
        if not self.editable_mode:
            # The sources go along, for a machine whose torch and nvcc arrive after the install.
            shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "tpfused" / "csrc", dirs_exist_ok=True)


compiled = {
    "ext_modules": [Extension("tpfused._C", sources=[], py_limited_api=True)],
    "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
}
setup(
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython},
    **(compiled if toolchain else {}),
)
