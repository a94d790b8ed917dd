import pytest
import torch
from hypothesis import settings
from timm.layers import set_fused_attn

settings.register_profile('fixed', derandomize=True, deadline=None)
settings.load_profile('fixed')


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fused_attn_restored():
    yield
    set_fused_attn(True)
