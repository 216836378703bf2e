"""The built wheel, installed alone in a clean environment and used from outside the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"

CHECK = """
import json, pathlib, sys
from importlib.metadata import version
import oscar_hf

package = pathlib.Path(oscar_hf.__file__).resolve().parent
assert package.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"imported from {package}"
assert (package / "py.typed").is_file()
json.loads((package / "rotation_zoo" / "index.json").read_text())
assert version("oscar-hf") == oscar_hf.__version__
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of a new environment that holds the wheel, and sees its dependencies."""
    tmp = tmp_path_factory.mktemp("packaging")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp / "dist", ROOT, cwd=tmp)
    (wheel,) = (tmp / "dist").glob("*.whl")

    venv.create(tmp / "venv", with_pip=True, symlinks=True)
    scripts = tmp / "venv" / "bin"
    run(scripts / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp)

    # Folders that a .pth file adds come last, and .pth files inside them are ignored: torch and the other
    # dependencies are found there, an editable install of this checkout is not.
    site_packages = run(scripts / "python", "-c", PURELIB, cwd=tmp).strip()
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site_packages, "dependencies.pth").write_text("\n".join(dependencies))
    return scripts


def run(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_is_complete(installed: Path, tmp_path: Path) -> None:
    run(installed / "python", "-c", CHECK, cwd=tmp_path)


def test_command_line_starts(installed: Path, tmp_path: Path) -> None:
    assert "Usage" in run(installed / "oscar-hf", "--help", cwd=tmp_path)
