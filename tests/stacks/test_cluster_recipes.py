"""The recipes of examples/cluster: run where they can be, and held to the options and fields of their schedulers elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import dissensus as ds
import tiny
from refusals import refuses

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
# Options of sbatch that the recipes may use, and the form of their values (man sbatch).
SBATCH = {
    "job-name": r"\w+", "nodes": r"\d+", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+", "time": r"(\d+-)?\d+:\d\d:\d\d", "signal": r"(B:)?TERM@\d+", "requeue": "",
    "array": r"\d+-\d+(%\d+)?", "open-mode": "append|truncate", "output": r"[\w%.-]+",
}  # fmt: skip
# Fields of a PyTorchJob of kubeflow.org/v1, with those that it needs (*): pytorch_types.go and common_types.go of the operator.
JOB = {
    "apiVersion*": "kubeflow.org/v1",
    "kind*": "PyTorchJob",
    "metadata*": {"name*": r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "namespace": r"[-a-z0-9]+"},
    "spec*": {
        "nprocPerNode": r"auto|cpu|gpu|\d+",
        "elasticPolicy": {
            "rdzvBackend": "c10d|etcd|etcd-v2",
            "minReplicas": int,
            "maxReplicas": int,
            "maxRestarts": int,
        },
        "runPolicy": {"cleanPodPolicy": "None|All|Running", "backoffLimit": int, "activeDeadlineSeconds": int},
        "pytorchReplicaSpecs*": {"Master": "replica", "Worker": "replica"},
    },
}
REPLICA = {"replicas*": int, "restartPolicy*": "Always|OnFailure|Never|ExitCode", "template*": {"spec*": dict}}


def check_fields(found, fields, where="job"):
    """Raises where a field is unknown, missing, or not of its form."""
    known = {name.rstrip("*"): form for name, form in fields.items()}
    assert found.keys() <= known.keys(), f"{where}: {found.keys() - known.keys()}"
    assert {name[:-1] for name in fields if name.endswith("*")} <= found.keys(), where
    for name, value in found.items():
        form, place = known[name], f"{where}.{name}"
        if form == "replica":
            check_fields(value, REPLICA, place)
        elif isinstance(form, dict):
            check_fields(value, form, place)
        elif isinstance(form, str):
            assert isinstance(value, str), place  # nprocPerNode: 8 without quotes is refused by the API
            assert re.fullmatch(form, value), place
        else:
            assert isinstance(value, form), place


def run_recipe(folder, name, *options):
    """What a recipe prints at its end."""
    call = [sys.executable, str(FOLDER / name), "--epochs", "2", *options]
    path = os.pathsep.join([str(Path(ds.__file__).parents[1]), str(FOLDER)])
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_DISABLE_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(call, cwd=folder, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_of_bash_and_ask_slurm_for_what_it_knows(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    asked = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    assert len(asked) == text.count("#SBATCH")
    for name, value in asked:
        assert re.fullmatch(SBATCH[name], value), name
    for script in re.findall(r"examples/cluster/\S+?\.(?:py|sh)", text):
        assert (ROOT / script).is_file(), script
    given = set(re.findall(r" (--[a-z][a-z-]+)", text.replace("#SBATCH --", "")))
    ours = {"--seed", "--seeds", "--out", "--signal"}  # of train.py, `dissensus bench` and scancel
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    assert given <= ours | known


def test_the_job_of_kubernetes_has_the_fields_of_its_schema():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e .[stacks]")
    job = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    check_fields(job, JOB)
    (replica,) = job["spec"]["pytorchReplicaSpecs"].values()
    assert (
        job["spec"]["elasticPolicy"]["minReplicas"]
        <= replica["replicas"]
        <= job["spec"]["elasticPolicy"]["maxReplicas"]
    )
    (container,) = replica["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # by which the operator finds it
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in replica["template"]["spec"]["volumes"]}
    assert container["command"][0] == "torchrun"
    assert (ROOT / container["command"][1]).is_file()
    refuses(lambda: check_fields({**job, "spec": {**job["spec"], "replica": 2}}, JOB), "replica", AssertionError)


def test_two_workers_of_ray_train_as_one_process(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e .[stacks]")
    alone = run_recipe(tmp_path, "train.py", "--out", "one")
    assert run_recipe(tmp_path, "ray_train.py", "--workers", "2", "--out", "two").endswith(alone)
    one, two = (ds.load(tmp_path / name / "posterior").state_dict() for name in ("one", "two"))
    assert tiny.largest_difference(one, two) < 2e-6  # float32


def test_ray_tune_finds_the_best_of_its_trials(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e .[stacks]")
    last = run_recipe(tmp_path, "ray_tune.py", "--out", "tuned").splitlines()[-1]
    assert re.fullmatch(r"lr 0\.\d+  nll \d\.\d+  accuracy \d\.\d+", last), last
    assert sorted(each.name for each in (tmp_path / "tuned").glob("lr*")) == ["lr0.001", "lr0.01", "lr0.1"]
