"""Runs and measures GPU kernels on a machine without a GPU."""
