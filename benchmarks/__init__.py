"""Timings and memory, each a module: python -m benchmarks.<name>.

A package with this file, since pyarrow installs one of the same name, which would come first.
"""
