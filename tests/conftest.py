"""Settings every test needs before torch or transformers start work."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# some machines ask for colours everywhere, which splits the words that tests look for
os.environ.pop("FORCE_COLOR", None)

import pytest
import torch

# tiny models lose more to thread hand-over than they gain
torch.set_num_threads(1)
# a run in the background may have been told to ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
