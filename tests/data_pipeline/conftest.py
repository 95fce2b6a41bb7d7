"""Small corpora, made where a test needs them."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty text files of 1 to 400 random lower-case letters, all different."""
    rng = np.random.default_rng(7)
    root = tmp_path / "folder"
    for i in range(40):
        path = root / f"sub{i % 3}" / f"{i:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        letters = rng.integers(97, 123, rng.integers(1, 400), np.uint8)
        path.write_bytes(b"%02d" % i + letters.tobytes())
    return root
