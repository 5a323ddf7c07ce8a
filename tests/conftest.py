"""Makes the helper modules beside this file importable from every test folder."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look through torch again and again, a tenth of all the time."""
    import hypothesis  # noqa: F401 - which looks for its generators' owners when it is loaded, and finds none that are frozen

    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tensors of a module that asks for this are tiny: one thread is fastest."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
