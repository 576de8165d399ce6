"""What an installation holds and exposes, and the doors between rooms that import-linter cannot see."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, entry_points, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moe_engine

ROOT = Path(__file__).resolve().parents[2]


def python(program: str, folder: Path, **environment: str) -> str:
    """What a fresh interpreter, started in `folder`, prints."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    result = subprocess.run([sys.executable, "-c", program], cwd=folder, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_loads_no_torch_and_no_hydra(tmp_path: Path) -> None:
    program = "import sys, moe_engine; print([n for n in ('torch', 'hydra', 'numpy', 'triton') if n in sys.modules])"
    assert python(program, tmp_path) == "[]"


def test_public_names_are_listed_and_load_on_use() -> None:
    assert set(moe_engine.__all__) <= set(dir(moe_engine))
    for name in moe_engine.__all__:
        assert getattr(moe_engine, name) is getattr(moe_engine, name)
    assert moe_engine.MoELayer.__module__ == "moe_engine.moe.layer"
    assert moe_engine.MoEConfig.__module__ == "moe_engine.config.schema"
    with pytest.raises(AttributeError, match="has no attribute 'MoELayers'"):
        _ = moe_engine.MoELayers


def test_the_name_kernels_stays_free(tmp_path: Path) -> None:
    program = "from importlib.util import find_spec; print(find_spec('moe_kernels') is not None, find_spec('kernels'))"
    assert python(program, tmp_path) == "True None"
    # Started in the checkout, where Python finds any folder, the library of that name still wins.
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    program = "import kernels; print(kernels.__file__)"
    assert python(program, ROOT, PYTHONPATH=str(tmp_path)) == str(tmp_path / "kernels" / "__init__.py")


def test_kernels_import_and_run_without_triton(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import torch, moe_kernels;"
        "print(moe_kernels.swiglu(torch.ones(2, 8)).shape)"
    )
    assert python(program, tmp_path) == "torch.Size([2, 4])"


def test_an_installation_finds_conf_from_any_folder(tmp_path: Path) -> None:
    program = "from moe_engine.config.load import conf_folder, load; load('train', []); print(conf_folder())"
    assert python(program, tmp_path) == str(ROOT / "conf")


def test_uninstalled_use_finds_conf(tmp_path: Path) -> None:
    """Only the checkout on the path: the interpreter's own site-packages give the libraries, ours is hidden."""
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in repr(f)];"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}];"
        "import importlib.util; assert importlib.util.find_spec('moe_kernels');"
        "from moe_engine.config.load import conf_folder; print(conf_folder())"
    )
    assert python(program, tmp_path) == str(ROOT / "conf")


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="moe-engine")
    assert command.value == "moe_engine.__main__:main"
    assert command.load() is importlib.import_module("moe_engine.__main__").main


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_constraints_are_exact() -> None:
    loose = {
        name: str(pin.specifier)
        for name, pin in constraints().items()
        if not re.fullmatch("==[^*,]+", str(pin.specifier))
    }
    assert loose == {"triton": "<=3.9.0,>=3.7.1"}  # torch's CUDA builds and its CPU builds ask for different ones
    assert str(constraints()["torch"].specifier) == "==2.13.0"


def needed(requirement: Requirement, seen: set[str]) -> None:
    """Add to `seen` the distributions that installing a requirement on this machine brings."""
    name = canonicalize_name(requirement.name)
    if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        return
    try:
        children = requires(name) or []
    except PackageNotFoundError:
        return  # not on this platform
    seen.add(name)
    for child in children:
        needed(Requirement(child), seen)


def test_constraints_cover_all_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    seen: set[str] = set()
    for line in project["dependencies"] + extras:
        needed(Requirement(line), seen)
    assert len(seen) > 40
    # torch's CUDA builds pin the CUDA libraries that they bring.
    assert {name for name in seen - constraints().keys() if not name.startswith(("nvidia-", "cuda-"))} == set()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run"])
def test_no_host_is_named_where_packages_come_from(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()


def test_make_help_lists_every_target() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    text = subprocess.run(
        ["make", "help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert [line.split()[1] for line in text.splitlines()] == phony[1].split()


def uses_torch_distributed(path: Path) -> bool:
    """Whether a file imports torch.distributed, or reaches it through `torch`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import) and any(name.name.startswith("torch.distributed") for name in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch.distributed."):
            return True
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and "distributed" in [n.name for n in node.names]
        ):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            return True
    return False


def test_only_these_rooms_call_torch_distributed() -> None:
    """import-linter sees external packages whole, so it cannot tell torch.distributed from torch."""
    package = ROOT / "moe_engine"
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if uses_torch_distributed(path)}
    assert "distributed/groups.py" in files and "cli/launch.py" in files
    doors = ("distributed/", "cli/launch.py", "checkpoint/", "bench/peers")
    assert {name for name in files if not name.startswith(doors)} == set()


def build(kind: str, folder: Path) -> zipfile.ZipFile:
    """A wheel (`build_wheel`) or editable wheel (`build_editable`) of the checkout, made without any network."""
    program = f"from hatchling.build import {kind}; print({kind}({str(folder)!r}))"
    return zipfile.ZipFile(folder / python(program, ROOT).splitlines()[-1])


@pytest.mark.slow
def test_a_wheel_holds_both_packages_and_conf(tmp_path: Path) -> None:
    wheel = build("build_wheel", tmp_path)
    names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {
        "moe_engine",
        "moe_kernels",
        f"moe_engine-{moe_engine.__version__}.dist-info",
    }
    yamls = {f"moe_engine/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "moe_engine").rglob("*.py")}
    kernels = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("*.py")}
    assert yamls and yamls | modules | kernels <= names
    site = tmp_path / "site"
    wheel.extractall(site)
    program = (
        "from moe_engine.config.load import conf_folder, load;"
        "load('train', ['experiment=quickstart']); print(conf_folder())"
    )
    assert python(program, tmp_path, PYTHONPATH=str(site)) == str(site / "moe_engine" / "conf")


@pytest.mark.slow
def test_an_editable_install_puts_no_folder_in_the_way(tmp_path: Path) -> None:
    """A moe_engine/ in site-packages (for conf/, say) would be found in place of the checkout."""
    names = build("build_editable", tmp_path).namelist()
    assert [name for name in names if name.startswith(("moe_engine/", "moe_kernels/", "kernels/", "conf/"))] == []
    assert any(name.endswith(".pth") for name in names)


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_trains_from_an_unrelated_folder(tmp_path: Path) -> None:
    """The engine comes from the wheel alone; the packages that it needs are those of this interpreter."""
    build("build_wheel", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-deps"]
    subprocess.run([*install, "--no-index", "--quiet", wheel], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    needed_packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "needed.pth").write_text("\n".join(needed_packages))  # a path from a .pth is not searched for .pth files
    where = "import moe_engine, moe_kernels; print(moe_engine.__file__, moe_kernels.__file__)"
    found = subprocess.run([environment / "bin" / "python", "-c", where], cwd=elsewhere, capture_output=True, text=True)
    assert [Path(path).parent.parent for path in found.stdout.split()] == [site, site], found.stderr
    words = ["train", "experiment=quickstart", "train.steps=3", "train.eval_sequences=8", "train.sample_tokens=8"]
    done = subprocess.run(
        [environment / "bin" / "moe-engine", *words], cwd=elsewhere, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks: pp 2 x dp 2, ep 2" in done.stdout and "step 3/3" in done.stdout
    assert {path.name for path in elsewhere.iterdir()} == {"runs", "data_cache"}


def test_nothing_asks_for_a_device_at_import(tmp_path: Path) -> None:
    """Every module is imported where each question to CUDA is an error."""
    program = (
        "import importlib, pkgutil, torch\n"
        "def ask(*_): raise SystemExit('asked for CUDA at import')\n"
        "for name in ('is_available', 'device_count', '_lazy_init', 'current_device', 'get_device_capability'):\n"
        "    setattr(torch.cuda, name, ask)\n"
        "import moe_engine, moe_kernels\n"
        "packages = (moe_engine, moe_kernels)\n"
        "names = [m.name for p in packages for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]\n"
        "for name in names:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name)\n"
        "print(len(names))"
    )
    assert int(python(program, tmp_path)) > 80
