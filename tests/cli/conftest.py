from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tokenizer of bytes."""
    return tiny_models.write_folder(tmp_path_factory.mktemp("models") / "folder")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a bundle with a prompt of its own."""
    path = tmp_path_factory.mktemp("models") / "tiny.kdtr"
    return tiny_models.write_bundle(path, extra={"prompt.tokens": np.arange(40, 52, dtype=np.int32)})
