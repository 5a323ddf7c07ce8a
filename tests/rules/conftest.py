"""The tensors of these tests are tiny."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def tiny(one_thread: None) -> None:
    """Every module here runs on one thread."""
