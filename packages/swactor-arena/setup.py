"""Only the cffi build hook and what belongs to the stable ABI; everything else is in pyproject.toml."""

import re

from setuptools import setup
from setuptools.command.build_ext import build_ext


class StableName(build_ext):
    """Names the library as every Python that the tag of the wheel promises looks for it: `_native.abi3.so`.
    Python 3.15 would put the platform in between, which older ones do not find."""

    def get_ext_filename(self, fullname: str) -> str:
        return re.sub(r"\.abi3-[^.]+\.so$", ".abi3.so", super().get_ext_filename(fullname))


setup(
    cffi_modules=["src/swactor_arena/_build.py:builder"],
    cmdclass={"build_ext": StableName},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
