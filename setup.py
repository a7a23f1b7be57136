"""Packages are named here because ``find_packages`` skips ``kernels``, which has no ``__init__.py``."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["specdec_fast", "specdec_fast.*"]), "specdec_fast.kernels"])
