"""What `agentevo launch` writes for each kind of cluster."""

import subprocess

import kubernetes_validate
import pytest
import yaml

from agentevo.cli.main import main
from agentevo.config import load_config
from agentevo.errors import ConfigError
from agentevo.runs.launch.plan import LaunchPlan, read_file
from agentevo.runs.launch.targets import read_cluster
from agentevo.runs.launch.writer import write_launch

STORE = "store.url=postgresql://me:${env:PW}@db/x"
APART = [
    "rollout.staleness=1", "rollout.policy=mask", "model.name=tiny", "cold_start.episodes=0", STORE
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(target, tmp_path, *overrides, **values):
    cluster = read_cluster(target, values)
    return write_launch("frozen_lake", [*APART, *overrides], cluster, tmp_path / "out")


def documents(path):
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


@pytest.mark.slow
def test_every_target_writes_the_same_recipe_and_nodes(tmp_path):
    for target in ("slurm", "kubernetes", "skypilot"):
        folder = write(
            target, tmp_path, gpus=4, engines=4, samplers=2,
            **({"accelerator": "H100", "volume": "v"} if target == "skypilot" else {}),
        ).folder  # fmt: skip
        plan = read_file(folder / "nodes.yaml", LaunchPlan)
        config = load_config(str(folder / plan.recipe), list(plan.overrides))
        assert config.trainer == load_config("frozen_lake", APART).trainer
        assert config.store.url == STORE.removeprefix("store.url=")
        assert [len(node.engines) for node in plan.nodes] == [0, 4]


@pytest.mark.slow
def test_the_batch_script_is_bash_and_asks_for_what_was_said(tmp_path):
    folder = write(
        "slurm", tmp_path, gpus=8, engines=8, samplers=1, partition="gpu", time="02:00:00",
        cpus_per_node=32, sbatch=["--exclusive"], setup="module load cuda",
    ).folder  # fmt: skip
    script = (folder / "job.sbatch").read_text()
    subprocess.run(["bash", "-n", folder / "job.sbatch"], check=True)

    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=02:00:00"):
        assert f"#SBATCH {line}\n" in script

    assert "#SBATCH --exclusive\n" in script
    assert "export SRUN_CPUS_PER_TASK=32\n" in script
    assert script.index("module load cuda") < script.index("${PW:?") < script.index("srun")


@pytest.mark.slow
def test_the_manifest_gives_secrets_by_reference_and_the_code_beside_the_recipe(tmp_path):
    (tmp_path / "mine.py").write_text("A = 1\n")
    folder = write(
        "kubernetes", tmp_path, "import=[./mine.py]", gpus=2, engines=2, gpus_per_engine=2,
        samplers=1, node_selector={"pool": "gpu"},
    ).folder  # fmt: skip
    found = documents(folder / "manifest.yaml")
    data = found["ConfigMap"]["data"]
    assert data["mine.py"] == "A = 1\n"
    assert yaml.safe_load(data["recipe.yaml"])["import"] == ["./mine.py"]

    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]

    assert job["completions"] == job["parallelism"] == 3
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["nodeSelector"] == {"pool": "gpu"}

    secret = next(one for one in container["env"] if one["name"] == "PW")
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "agentevo", "key": "PW"}
    assert found["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]

    head = f"--head={found['Job']['metadata']['name']}-0.{found['Service']['metadata']['name']}"
    assert head in container["args"]


@pytest.mark.slow
def test_kubernetes_itself_would_take_it(tmp_path):
    folder = write(
        "kubernetes", tmp_path, gpus=1, engines=1, samplers=1, storage_class="fast"
    ).folder
    for document in yaml.safe_load_all((folder / "manifest.yaml").read_text()):
        kubernetes_validate.validate(document, "1.33", strict=True)


@pytest.mark.slow
def test_texts_of_people_arrive_as_they_were_written(tmp_path):
    setup = "echo '\N{ROCKET}' \"a: b\" # c\nsource x"
    folder = write("skypilot", tmp_path, "run.name='true'", setup=setup, infra="{{ no }}").folder
    task = yaml.safe_load((folder / "task.sky.yaml").read_text())
    assert task["setup"] == setup
    assert task["resources"]["infra"] == "{{ no }}"
    assert task["name"] == "true"

    folder = write("kubernetes", tmp_path, node_selector={"a": "no"}, namespace="on").folder
    job = documents(folder / "manifest.yaml")["Job"]
    assert job["metadata"]["namespace"] == "on"
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"a": "no"}


def test_compose_has_the_run_and_a_dashboard_that_only_reads(tmp_path):
    folder = write("compose", tmp_path, gpus=2, engines=1, samplers=1).folder
    project = yaml.safe_load((folder / "compose.yaml").read_text())
    services = project["services"]
    assert project["name"] == "agentevo-frozen-lake"

    (devices,) = services["run"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == 2
    assert services["run"]["environment"]["PW"].startswith("${PW:?")
    assert services["ui"]["volumes"] == ["../runs:/runs:ro"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "coins", "--set", "partitoin=a"], "did you mean partition?"),
        (["slrm", "coins"], "--on slrm: there are slurm, kubernetes"),
        (["slurm", "coins", "--set", "gpus=many"], "slurm.gpus"),
        (["slurm", "coins", "run.overwrite=true"], "run.overwrite"),
        (["slurm", "coins", "--out", "my launch"], "can't contain a blank"),
        (
            ["slurm", "coins", "memory.optimizer=adamw_8bit", "trainer.parallel.shard=2",
             "--set", "gpus=2"],
            "moments of 8 bits",
        ),
        (["slurm", "coins", "rollout.samplers=2", "rollout.staleness=1"], "rollout.samplers=2"),
        (
            ["slurm", "coins", "rollout.staleness=1", "--set", "gpus=1", "--set", "engines=1",
             "--set", "samplers=2"],
            "store.url",
        ),
        (["skypilot", "coins", "--set", "gpus=1"], "accelerator"),
        (["skypilot", "coins", "--set", "gpus=8", "--set", "accelerator=H100:8"], "device alone"),
        (["skypilot", "coins", "--set", "memory=lots"], "16+ for at least as many"),
        (["kubernetes", "coins", "--set", "storage=lots"], "such as 4, 500m, 16Gi"),
        (["slurm", "coins", "--set", "time=2h"], "minutes, [hours:]minutes:seconds or"),
        (["slurm", "coins", "--set", "memory=lots"], "a number of MB"),
        (["skypilot", "coins", "--set", "trainer_nodes=2"], "volume"),
        (["compose", "coins", "--set", "trainer_nodes=2"], "one machine"),
        (["slurm", "coins", "--values", "nothing.yaml"], "--values nothing.yaml"),
        (["slurm", "no_such_recipe"], "no_such_recipe"),
    ],
)  # fmt: skip
def test_what_can_not_run_is_refused_and_nothing_written(words, said, tmp_path, capsys):
    kind, *words = words
    assert main(["launch", *words, "--on", kind]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "thesis.tex").write_text("mine")
    assert main(["launch", "coins", "--on", "slurm"]) == 2
    assert "has other contents" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "launch").iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_what_else_lies_in_the_folder_stays(tmp_path):
    folder = write("slurm", tmp_path).folder
    (folder / "17.log").write_text("a job's")
    write("slurm", tmp_path, partition="b")
    assert (folder / "17.log").read_text() == "a job's"


def test_values_come_from_a_file_and_words_win(tmp_path):
    (tmp_path / "values.yaml").write_text("partition: one\nqos: low\n")
    words = ["coins", "--on", "slurm", "--values", "values.yaml", "--set", "partition=two"]
    assert main(["launch", *words]) == 0
    script = (tmp_path / "launch" / "job.sbatch").read_text()
    assert "--partition=two" in script
    assert "--qos=low" in script


def test_submit_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "coins", "--on", "slurm", "--submit"]) == 1
    assert "sbatch is not installed here" in capsys.readouterr().err


def test_submit_shows_what_the_tool_said(tmp_path, capsys, monkeypatch):
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    assert main(["launch", "coins", "--on", "slurm", "--submit"]) == 1
    assert "invalid partition" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["launch", "coins", "--on", "slurm", "--values"], ["launch-node", "--rank=0"]]
)
def test_a_device_without_an_end_is_no_file_of_a_launch(words, capsys):
    assert main([*words, "/dev/zero"]) == 2
    assert "give a file" in capsys.readouterr().err


@pytest.mark.slow
def test_places_of_this_machine_go_along_with_containers_or_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "2 + 2?", "answer": "4"}\n')
    recipe = tmp_path / "asks.yaml"
    recipe.write_text("tasks: {train: rows.jsonl, eval: rows.jsonl}\nrewards: [contains]\n")

    out = write_launch(str(recipe), [STORE], read_cluster("kubernetes", {}), tmp_path / "out")
    data = documents(out.folder / "manifest.yaml")["ConfigMap"]["data"]
    assert data["rows.jsonl"] == rows.read_text()
    assert yaml.safe_load(data["recipe.yaml"])["tasks"]["train"] == ["./rows.jsonl"]

    (tmp_path / "ckpt").mkdir()
    for words in (["model.name=./ckpt"], ["model.name=ckpt/"], [f"model.name={tmp_path}/ckpt"]):
        with pytest.raises(ConfigError, match=r"^model\.name: .*on this machine.*/runs$"):
            write_launch(str(recipe), words, read_cluster("compose", {}), tmp_path / "other")

    rows.write_bytes(b"\xff\xfe" * 10)
    with pytest.raises(ConfigError, match=r"tasks\.train\.0: it can't be copied.*not UTF-8"):
        write_launch(str(recipe), [], read_cluster("skypilot", {}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_rows_do_not_replace_the_files_of_the_launch(tmp_path):
    rows = tmp_path / "recipe.yaml"
    rows.write_text('[{"query": "2 + 2?", "answer": "4"}]\n')
    recipe = tmp_path / "asks.yaml"
    recipe.write_text("tasks: {train: recipe.yaml, eval: recipe.yaml}\nrewards: [contains]\n")
    with pytest.raises(ConfigError, match=r"tasks\.train\.0: two files are called recipe\.yaml"):
        write_launch(str(recipe), [], read_cluster("compose", {}), tmp_path / "out")


def test_nodes_that_share_folders_read_places_of_this_machine_by_their_absolute_path(
    tmp_path, capsys
):
    (tmp_path / "ckpt").mkdir()
    words = [
        "launch",
        "coins",
        "--on",
        "slurm",
        "model.name=./ckpt",
        "--set",
        "gpus=1",
        "--out",
        "out",
    ]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert f"every node reads model.name under {tmp_path}/ckpt" in said
    assert "set engine.type=vllm if they have vLLM" in said
    written = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert written["model"]["name"] == f"{tmp_path}/ckpt"


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["gpus=1"], []),
        ([], []),
        (["gpus=8"], ["7 of 8 devices are idle", "--set engines=4 --set samplers=1"]),
        (["gpus=8", "trainer_nodes=2"], ["15 of 16 devices are idle", "--set engines=8"]),
        (["gpus=8", "trainer_gpus=2"], ["1 of 8 devices are idle", "6 of 8 devices have no"]),
        (["gpus=8", "engines=4", "samplers=1"], []),
        (["gpus=8", "engines=9", "samplers=1"], ["7 of 24 devices have no process"]),
    ],
    ids=str,
)
def test_devices_that_would_be_idle_are_warned_of(words, warned, capsys):
    settings = [option for word in words for option in ("--set", word)]
    assert main(["launch", "frozen_lake", "--on", "slurm", *APART, *settings]) == 0
    lines = capsys.readouterr().err
    assert all(text in lines for text in warned), lines
    assert bool(warned) == ("warning: " in lines)


def test_nobody_samples_where_pairs_are_given(tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text("")
    words = ["algorithm.name=dpo", "data.pairs=pairs.jsonl", "--set", "gpus=8"]
    assert main(["launch", "frozen_lake", "--on", "slurm", "cold_start.episodes=0", *words]) == 0
    assert "warning" not in capsys.readouterr().err
