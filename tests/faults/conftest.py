from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good Hugging Face folder; tests break copies of it."""
    return tiny_models.write_folder(tmp_path_factory.mktemp("models") / "folder")
