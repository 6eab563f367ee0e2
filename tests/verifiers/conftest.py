"""Helpers of this folder are imported by name. Small tensors: threads cost more than they give."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
