"""The files in launch/ by the programs that know their languages, and against what they name in this repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = [".ci/run", "launch/env.sh", "launch/local.sh", "launch/slurm.sbatch"]


def program(name: str) -> str:
    """The path of a program from the development packages; skips where they have it for no such machine."""
    path = Path(sys.executable).parent / name
    found = str(path) if path.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_are_sound(script: str) -> None:
    done = subprocess.run([program("shellcheck"), "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_is_sound() -> None:
    done = subprocess.run([program("hadolint"), LAUNCH / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def dockerfile() -> list[str]:
    """The instructions, each on one line."""
    lines = [line for line in (LAUNCH / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def test_the_dockerfile_names_what_is_there() -> None:
    copied = [word for line in dockerfile() if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert "moe_engine" in copied and all((ROOT / name).exists() for name in copied)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [target for line in dockerfile() for target in re.findall(r"\bmake (\w+) ", line) if line.startswith("RUN")]
    assert "install" in used and set(used) <= {*targets, "gcc"}  # gcc: the word after make in the apt-get line


def test_what_the_dockerfile_copies_is_enough_to_install(tmp_path: Path) -> None:
    """Its `make install`, but without the packages from elsewhere: an editable wheel is built from the copied files."""
    for name in (word for line in dockerfile() if line.startswith("COPY ") for word in line.split()[1:-1]):
        source = ROOT / name
        copy: Any = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    build = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("moe_engine-*.whl"))


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_kubernetes_objects_keep_their_published_schemas() -> None:
    for document in kubernetes():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    _, job = kubernetes()
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):  # the schemas do refuse what they do not know
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_objects_agree_with_each_other() -> None:
    service, job = kubernetes()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert str(spec["completions"]) == str(spec["parallelism"]) == environment["NODES"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == environment["RANKS_PER_NODE"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    # A pod of an Indexed Job is called <job>-<index>; the headless service of its subdomain resolves that name.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert f"--master-port={service['spec']['ports'][0]['port']}" in container["args"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_env_sets_each_variable_with_a_reason_and_only_where_it_is_not_set() -> None:
    lines = [line for line in (LAUNCH / "env.sh").read_text().splitlines() if line.startswith("default ")]
    named = {line.split()[1]: line.split()[2] for line in lines}
    assert len(named) == len(lines) > 5
    assert all(re.fullmatch(r"default \w+ \S+ +# \S.{15,}", line) for line in lines), "one line of why for each"
    show = f"set -u; source {LAUNCH}/env.sh; env"
    bare = {"PATH": os.environ["PATH"]}
    fresh = subprocess.run(["bash", "-c", show], env=bare, capture_output=True, text=True, check=True).stdout
    assert {f"{name}={value}" for name, value in named.items()} <= set(fresh.splitlines())
    given = bare | {"NCCL_DEBUG": "INFO"}
    kept = subprocess.run(["bash", "-c", show], env=given, capture_output=True, text=True, check=True).stdout
    assert "NCCL_DEBUG=INFO" in kept.splitlines()


def test_local_passes_its_words_on(tmp_path: Path) -> None:
    words = ["experiment=quickstart", "run.check=true", f"run.dir={tmp_path / 'runs with space'}"]
    done = subprocess.run([LAUNCH / "local.sh", *words], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())  # YAML breaks long lines at spaces
    assert "# layout: 4 ranks = pp 2 x dp 2" in told and "runs with space" in told
    assert list(tmp_path.iterdir()) == []
