"""Only the cffi build hook; everything else is in pyproject.toml."""

from setuptools import setup

setup()
