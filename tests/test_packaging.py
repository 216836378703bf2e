"""The built wheel, installed alone in a clean environment and used from outside the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"

CHECK = """
import json, pathlib, sys
from importlib.metadata import version
import oscar_hf

package = pathlib.Path(oscar_hf.__file__).resolve().parent
assert package.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"imported from {package}"
assert (package / "py.typed").is_file()
assert json.loads((package / "rotation_zoo" / "index.json").read_text())
assert version("oscar-hf") == oscar_hf.__version__
"""


def test_wheel_works_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()

    def run(*command: object) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(map(str, command), cwd=outside, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    scripts = tmp_path / "venv" / "bin"
    run(scripts / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)

    # Folders that a .pth file adds come last, and .pth files inside them are ignored: torch and the other
    # dependencies are found there, an editable install of this checkout is not.
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site_packages = run(scripts / "python", "-c", PURELIB).strip()
    Path(site_packages, "dependencies.pth").write_text("\n".join(dependencies))

    run(scripts / "python", "-c", CHECK)
    assert "Usage" in run(scripts / "oscar-hf", "--help")
    assert '"recipe": "balanced"' in run(scripts / "oscar-hf", "inspect", "smollm2-135m-instruct", "--json")
