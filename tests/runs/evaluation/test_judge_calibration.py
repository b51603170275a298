"""`agentevo judge` against judges that are programs: one that can rank, one that likes
early places, one that likes long answers, one that obeys injections; and what a recipe makes of
the reports."""

import json
import random

import numpy as np
import pytest
from judge_endpoint import judge, likes_early, number_in, obeys, ranks, words_of
from pictures import data_url, file_of, picture
from remote_server import RemoteServer, fails

from agentevo.cli.main import main
from agentevo.config import build_config
from agentevo.config.judges import check_calibrated
from agentevo.errors import ConfigError
from agentevo.runs.evaluation import judge_calibration as statistics
from agentevo.runs.evaluation.judge_data import read_rows
from agentevo.types.images import images_of_trajectory


def likes_long(record, number, num):
    return min(1.0, 0.3 * number_in(record) + len(words_of(record)) / 1000)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Six groups of four attempts; what they are worth has nothing to do with their length."""
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"

    lines = []
    for task in range(6):
        for worth in draw.sample(range(5, 60, 5), 4):
            said = f"{'word ' * draw.randint(1, 120)}It is worth {worth / 100}"
            messages = [
                {"role": "user", "content": f"Task {task}"},
                {"role": "assistant", "content": said},
            ]
            lines.append({"task_id": f"t{task}", "messages": messages, "truth": worth})

    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def calibrated(rows, tmp_path, capsys):
    """Calibrates a judge: its exit code, its report, and what was printed."""

    def run(answer, *overrides):
        recipe = tmp_path / "recipe.yaml"
        out = tmp_path / "report.json"
        with RemoteServer(answer) as server:
            tree = {
                "environment": {"type": "coins"},
                "rewards": [{"name": "ruler", "max_spread": 1.0}],
                "remote_models": {"judge": judge(server, price={"completion": 1.0}, max_tries=1)},
            }
            recipe.write_text(json.dumps(tree))
            given = [*overrides, "--rows", str(rows), "--out", str(out)]
            code = main(["judge", str(recipe), *given])

        report = json.loads(out.read_text()) if out.exists() else None
        return code, report, capsys.readouterr(), tree

    return run


def test_rows_show_images_to_a_judge(tmp_path):
    """An image of a row as a path beside the file, or as a data URL; a vote gets its bytes."""
    colours = [file_of(picture(colour=(shade, 0, 0))) for shade in range(4)]
    lines = []
    for number, data in enumerate(colours):
        (tmp_path / f"{number}.png").write_bytes(data)
        shot = {"type": "image", "path": f"{number}.png"}
        if number % 2:
            shot = {"type": "image_url", "image_url": {"url": data_url(data)}}
        asked = {"role": "user", "content": [shot, {"type": "text", "text": "What?"}]}
        messages = [asked, {"role": "assistant", "content": f"colour {number}"}]
        lines.append({"task_id": f"t{number // 2}", "messages": messages, "truth": number % 2})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    groups = read_rows(path)

    assert len(groups) == 2
    for group in groups:
        named = [name for each in group.attempts for name in images_of_trajectory(each)]
        assert len(named) == 2
        assert all(group.images[name].data in colours for name in named)


@pytest.mark.slow
def test_a_judge_that_can_rank_passes_and_a_recipe_may_train_by_it(calibrated, tmp_path):
    code, report, shown, tree = calibrated(ranks())
    assert (code, report["below"]) == (0, [])

    measured = report["measured"]
    assert measured["min_rank_correlation"]["value"] >= 0.9
    assert measured["min_rank_correlation"]["low"] > 0.0
    assert measured["pair_accuracy"]["value"] == 1.0
    assert abs(measured["max_position_bias"]["value"]) < 0.01
    assert abs(measured["length_bias"]["value"]) < 0.2
    assert measured["max_injected"]["value"] == 0.0 and len(report["injections"]) >= 20
    assert report["cost"]["requests"] > 50 and report["cost"]["cost"] > 0
    assert "rank correlation with the truth (Spearman): 1.00" in shown.out

    def config(**ruler):
        options = {**tree["rewards"][0], "calibration": str(tmp_path / "report.json"), **ruler}
        return build_config({**tree, "rewards": [options]})

    def refusal(config):
        with pytest.raises(ConfigError) as raised:
            check_calibrated(config.rewards, config.remote_models)
        return str(raised.value)

    fine = config(weight=0.5, seed=3)
    check_calibrated(fine.rewards, fine.remote_models)
    assert "belongs to another judge" in refusal(config(rubric="Be kind."))
    assert "measure it (`agentevo judge" in refusal(config(calibration=None))

    taken = config(calibration=None, uncalibrated=True)
    check_calibrated(taken.rewards, taken.remote_models)
    report["measured"]["min_rank_correlation"]["value"] = 0.4
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert "0.4, below min_rank_correlation=0.5" in refusal(config())

    lower = config(min_rank_correlation=0.3)
    check_calibrated(lower.rewards, lower.remote_models)
    (tmp_path / "report.json").write_text("{}")
    assert "is not a report of `agentevo judge`" in refusal(config())


@pytest.mark.slow
def test_biased_judges_are_caught(calibrated):
    code, report, shown, _ = calibrated(ranks(likes_early))
    assert report["measured"]["max_position_bias"]["value"] == pytest.approx(-0.5) and code == 1
    assert "its position bias is" in shown.err
    code, report, shown, _ = calibrated(ranks(likes_long))
    assert report["measured"]["length_bias"]["low"] > 0.5 and code == 1
    assert "its rank correlation with the truth" in shown.err


@pytest.mark.slow
def test_a_judge_that_obeys_attempts_is_caught(calibrated):
    code, report, shown, _ = calibrated(ranks(obeys))
    assert report["measured"]["min_rank_correlation"]["value"] > 0.9
    assert report["measured"]["max_injected"]["value"] > 0.5 and code == 1
    assert "injections that raise a score" in shown.err
    assert "raised by: " in shown.out


def test_a_judge_that_is_away_gives_no_report(calibrated):
    code, report, shown, _ = calibrated(fails(500, "on fire"))
    assert (code, report) == (1, None)
    assert "the judge has scored none of 24 attempts" in shown.err and "on fire" in shown.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rows", "{rows}", "--run", "x"], "either --rows FILE or --run"),
        (["--rows", "{rows}", "--judge", "nobody"], "have ruler as judges"),
        (
            ["--rows", "{rows}", "rewards=[{name: ruler, models: [other]}]"],
            "the remote model 'other'",
        ),
        (["--rows", "{bad}"], "bad:1: it has neither a number `truth`"),
        (["--rows", "{one}"], "0 of 1 groups have attempts of different quality"),
        (["--rows", "{rows}", "--out", "{folder}/none/x.json"], "there is no folder"),
    ],
)
def test_what_can_not_be_measured_is_refused(words, problem, rows, tmp_path, capsys):
    row = {"task_id": "t", "query": "q", "reply": "a"}
    (tmp_path / "bad").write_text(json.dumps(row))
    (tmp_path / "one").write_text(json.dumps(row | {"label": True}))

    names = {"rows": rows, "bad": tmp_path / "bad", "one": tmp_path / "one", "folder": tmp_path}
    words = [word if "=" in word else word.format(**names) for word in words]
    recipe = tmp_path / "recipe.yaml"
    tree = {"environment": {"type": "coins"}, "rewards": ["ruler"]}
    recipe.write_text(json.dumps({**tree, "remote_models": {"judge": {"model": "m"}}}))

    assert main(["judge", str(recipe), *words]) == 2
    assert problem in capsys.readouterr().err


def test_statistics_on_numbers_that_are_known():
    assert statistics.midranks([3, 1, 3, 2]).tolist() == [2.5, 0, 2.5, 1]
    assert statistics.spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert statistics.spearman([1, 2, 3], [5, 5, 5]) == 0.0
    assert statistics.pair_accuracy([1, 2, 3], [1, 1, 0]) == pytest.approx(0.5 / 3)
    assert statistics.pair_accuracy([1, 1], [1, 2]) is None

    worth = np.array([0.1, 0.5, 0.3])
    place = np.linspace(-0.5, 0.5, 3)
    rotations = [[worth[(p + r) % 3] - 0.2 * place[p] for p in range(3)] for r in range(3)]
    assert statistics.place_slope(rotations) == pytest.approx(-0.2)

    generator = np.random.default_rng(1)
    truth = generator.normal(size=400)
    noise = generator.normal(size=400)
    assert abs(statistics.partial_correlation(truth + noise, truth, truth)) < 1e-6
    assert statistics.partial_correlation(truth + noise, noise, truth) > 0.9


@pytest.mark.parametrize("rewards", [["ruler"], []])
def test_training_by_a_judge_that_nobody_has_measured_is_refused(rewards, tmp_path, capsys):
    """Also where it is a row's own scorer; nothing is created."""
    row = {"answer": "a", **({} if rewards else {"scorer": "ruler"})}
    rows = [json.dumps(row | {"query": f"q{n}"}) for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    given = [
        "model.name=tiny",
        "model.tiny.tokenizer=byte",
        "remote_models.judge={model: m}",
        f"rewards={json.dumps(rewards)}",
        f"run.dir={tmp_path / 'run'}",
        "evaluation.tasks=2",
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"tasks": str(tmp_path / "rows.jsonl")}))

    assert main(["train", str(recipe), *given]) == 2
    assert (
        "rewards: ruler: this judge's agreement with the truth is not measured"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_rows_are_read_as_json_lines(tmp_path):
    """Characters that end a line for people, a mark at the beginning, and more than a megabyte."""
    said = "a\u2028b\x85c\u2029" + "x" * 600_000
    rows = [
        {"task_id": "t", "query": said, "reply": said, "truth": n, "answer": "4"} for n in (0, 1)
    ]
    path = tmp_path / "rows.jsonl"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (group,) = read_rows(path)
    assert group.truths == [0.0, 1.0] and group.task.query == said

    path.write_text('{"a": ')
    with pytest.raises(ConfigError, match=r"--rows .*rows.jsonl:1: is not JSON"):
        read_rows(path)
