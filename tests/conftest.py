import pytest
import torch
from hypothesis import settings

settings.register_profile('fixed', derandomize=True, deadline=None)
settings.load_profile('fixed')


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
