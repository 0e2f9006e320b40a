"""What one would publish: built, installed where the checkout is not, and run."""

import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import dissensus as ds

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path) -> str:
    """What a command prints, without this checkout on its path."""
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DISSENSUS_DATA")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel that was made of it."""
    pytest.importorskip("build", reason="build is not installed")
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for left in (source / "src").glob("*.egg-info"):
        shutil.rmtree(left)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    return out


def test_the_wheel_holds_all_that_the_library_reads_and_nothing_else(built):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"dissensus-{ds.__version__}-py3-none-any.whl"
    inside = zipfile.ZipFile(wheel)
    names = {name for name in inside.namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "dissensus"
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    assert names == {name for name in files if "__pycache__" not in name}
    with tarfile.open(archive) as source:
        assert any(name.endswith("/LICENSE") for name in source.getnames())
    about = message_from_bytes(inside.read(f"dissensus-{ds.__version__}.dist-info/METADATA"))
    assert (about["License-Expression"], about["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert about["Description-Content-Type"].startswith("text/markdown")
    assert "torch>=2.11" in about.get_all("Requires-Dist")


def test_the_wheel_runs_where_the_checkout_is_not(built, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", next(built.glob("*.whl")), cwd=tmp_path)
    (home,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    # torch and the others from where they are; links of editable installs there are not followed.
    (home / "dependencies.pth").write_text("\n".join([*site.getsitepackages()]))
    where = run(python, "-c", "import dissensus; print(dissensus.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(home)
    program = tmp_path / "env" / "bin" / "dissensus"
    assert run(program, "--version", cwd=tmp_path) == f"dissensus {ds.__version__}\n"
    run(program, "bench", "--size", "smoke", "--out", "first", "--quiet", cwd=tmp_path)
    assert (tmp_path / "first" / "report.html").stat().st_size > 50_000
