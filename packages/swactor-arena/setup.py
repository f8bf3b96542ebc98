"""Only the cffi build hook and the stable-ABI tag; everything else is in pyproject.toml."""

from setuptools import setup

setup(
    cffi_modules=["src/swactor_arena/_build.py:builder"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
