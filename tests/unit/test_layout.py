"""The tree: packages resolve to this checkout, every module imports, the schema needs no torch."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("erase_rec", "models", "data", "eval")


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_this_checkouts(name: str, checkout: Path) -> None:
    """A stray ./data folder or an installed namesake must not take its place."""
    assert Path(importlib.import_module(name).__file__ or "").parent == checkout / name


@pytest.mark.parametrize("name", ["models", "data", "eval"])
def test_content_packages_have_empty_inits(name: str, checkout: Path) -> None:
    assert (checkout / name / "__init__.py").read_text() == ""


def test_no_test_folder_is_a_package(checkout: Path) -> None:
    assert list((checkout / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_imports(package: str) -> None:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # Triton comes with PyTorch's CUDA builds only
                if (error.name, ".kernels." in module.name) != ("triton", True):
                    raise


def test_every_package_is_installed(checkout: Path) -> None:
    """`pip install` ships the packages by name: a new sub-package must be listed."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(checkout).parts)
        for package in PACKAGES
        for path in (checkout / package).rglob("__init__.py")
    }
    assert listed - {"erase_rec.configs"} == found, "shipped configurations are no code"


def test_a_wheel_holds_what_an_installed_command_needs(checkout: Path, tmp_path: Path) -> None:
    """Every module, the shipped configurations, the type marker and the licence; and it finds its configurations."""
    source = tmp_path / "source"
    for path in (*PACKAGES, "configs"):
        shutil.copytree(checkout / path, source / path, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / path, source / path)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    modules = {str(path.relative_to(source)) for package in PACKAGES for path in (source / package).rglob("*.py")}
    configs = {str(Path("erase_rec", path.relative_to(source))) for path in (source / "configs").rglob("*.yaml")}
    licence = "erase_rec-0.1.0.dist-info/licenses/LICENSE"
    assert modules | configs | {"erase_rec/py.typed", licence} <= names
    look = "import erase_rec.config as c; print(c.find_config('ctr_erase.yaml'))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", look],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str((tmp_path / "installed/erase_rec/configs/ctr_erase.yaml").resolve())


def test_the_configuration_schema_imports_no_torch() -> None:
    code = "import sys, erase_rec.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_locks_differ_in_fbgemm_only(checkout: Path) -> None:
    def lines(kind: str) -> set[str]:
        text = (checkout / "requirements" / f"{kind}.lock").read_text()
        return {line for line in text.splitlines() if line and not line.startswith("#")}

    assert lines("cpu") ^ lines("cuda") == {"fbgemm-gpu-cpu==1.8.0", "fbgemm-gpu==1.8.0"}


def test_the_lock_is_complete() -> None:
    """Everything is installed without dependencies, so a line that is missing in a lock shows only at run time."""
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    problems = [line for line in found.stdout.splitlines() if "is not installed" in line or "but you have" in line]
    # TorchRec asks for the CUDA build by name; the CPU build takes its place.
    assert [line for line in problems if "requires fbgemm-gpu," not in line] == []
