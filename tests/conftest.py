"""Settings every test needs before torch or transformers start work."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# tiny models lose more to thread hand-over than they gain
torch.set_num_threads(1)
