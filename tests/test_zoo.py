"""The RotationZoo that comes with the package."""

from __future__ import annotations

import pytest

from oscar_hf.zoo import find_rotations, zoo_folder, zoo_index


@pytest.mark.parametrize("name", zoo_index())
def test_every_entry_is_sound_and_found_by_its_models(name: str) -> None:
    entry = zoo_index()[name]
    rotations = find_rotations(name)
    assert rotations.architecture and rotations.provenance["tokens"] > 0
    assert rotations.provenance["model"] in entry["models"]
    for model in entry["models"]:
        assert find_rotations(model.upper()).digest() == rotations.digest()
    assert name in (zoo_folder() / "README.md").read_text(encoding="utf-8")
