"""Every refusal: one clear line a problem that says what, where and what is right."""

from pathlib import Path

import pytest

from agentevo.config import build_config, load_config
from agentevo.errors import ConfigError, UnknownNameError

STORE_URLS = (
    "write it as sqlite:///PATH, postgresql://USER@HOST/DATABASE?schema=NAME or "
    "mongodb://HOST/DATABASE"
)
DOORS = "environment: {type: test_doors}\n"


def refusal(text: str | bytes, *overrides: str) -> list[str]:
    """The lines about a recipe file `r.yaml` with this text."""
    Path("r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config("r.yaml", list(overrides))
    assert [path.name for path in Path().iterdir()] == ["r.yaml"], "a refusal creates nothing"
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("yaml_line", "expected"),
    [
        (
            "trainer: {grop_size: 3}",
            "trainer.grop_size: unknown key; did you mean trainer.group_size?",
        ),
        (
            "trainer: {temperature: 3}",
            "trainer.temperature: unknown key; did you mean sampling.temperature?",
        ),
        ("trianer: {steps: 3}", "trianer: unknown key; did you mean trainer?"),
        ("environments: {type: x}", "environments: unknown key; did you mean environment?"),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean trainer.learning_rate?"),
        (
            "model: {hidden_size: 64}",
            "model.hidden_size: unknown key; did you mean model.tiny.hidden_size?",
        ),
        (
            "model: {tiny: {hidden: 64}}",
            "model.tiny.hidden: unknown key; did you mean model.tiny.hidden_size?",
        ),
        ("zzz: 2", "zzz: unknown key"),
        ("1: 2", "1: unknown key"),
        (
            "trainer: {steps: {x: 1}}",
            "trainer.steps.x: unknown key; trainer.steps is a single value (whole number, at "
            "least 0)",
        ),
        (
            "trainer: {steps: abc}",
            "trainer.steps: got 'abc'; needs a whole number, at least 0 (default 40)",
        ),
        (
            "trainer: {steps: 1.5}",
            "trainer.steps: got 1.5; needs a whole number, at least 0 (default 40)",
        ),
        (
            "trainer: {steps: -1}",
            "trainer.steps: got -1; needs a whole number, at least 0 (default 40)",
        ),
        (
            "trainer: {steps: true}",
            "trainer.steps: got true; needs a whole number, at least 0 (default 40)",
        ),
        (
            "trainer: {steps: null}",
            "trainer.steps: got null; needs a whole number, at least 0 (default 40)",
        ),
        (
            "trainer: {learning_rate: .inf}",
            "trainer.learning_rate: got inf; needs a number, above 0 (default 1e-05)",
        ),
        (
            "run: {threads: 0}",
            "run.threads: got 0; needs a whole number, at least 1, at most 1024, or null "
            "(default null)",
        ),
        ("tracking: {report: 3}", "tracking.report: got 3; needs true or false (default true)"),
        ("run: {name: no}", "run.name: got false; needs a text (default 'run')"),
        (
            "trainer: {betas: [0.9]}",
            "trainer.betas: got [0.9]; needs a list of 2 numbers, each at least 0, below 1 "
            "(default [0.9, 0.95])",
        ),
        (
            "trainer: {betas: [0.9, 2]}",
            "trainer.betas[1]: got 2; needs a list of 2 numbers, each at least 0, below 1 "
            "(default [0.9, 0.95])",
        ),
        (
            "sampling: {stop: abc}",
            "sampling.stop: got 'abc'; needs a list of texts, each at least 1 long (default [])",
        ),
        (
            "trainer: {schedule: cosin}",
            "trainer.schedule: got 'cosin'; did you mean cosine? needs one of constant, linear, "
            "cosine (default 'constant')",
        ),
        ("trainer: 5", "trainer: got 5; it is a section, set its keys, such as trainer.steps"),
        (
            "trainer: [1, 2]",
            "trainer: got [1, 2]; it is a section, set its keys, such as trainer.steps",
        ),
        (
            "trainer:",
            "trainer: is an empty section; remove it or put keys below it, such as trainer.steps",
        ),
        ("run:", "run: is an empty section; remove it or put keys below it, such as run.name"),
        (
            "run: {name: a/b}",
            "run.name: got 'a/b'; the name becomes a folder: use letters, digits, and `_ . + -` "
            "after the first",
        ),
        (
            "run: {name: ..}",
            "run.name: got '..'; the name becomes a folder: use letters, digits, and `_ . + -` "
            "after the first",
        ),
        ("store: {url: data.sqlite}", f"store.url: got 'data.sqlite'; {STORE_URLS}"),
        ("store: data.sqlite", f"store.url: got 'data.sqlite'; {STORE_URLS}"),
        ("store: {url: 'sqlite://x'}", f"store.url: got 'sqlite://x'; {STORE_URLS}"),
        ("store: {url: 'sqlite:///'}", f"store.url: got 'sqlite:///'; {STORE_URLS}"),
        ("run: {dir: ''}", "run.dir: got an empty path; give a folder, for example runs/my-run"),
        (
            "model: {tiny: {hidden_size: 33}}",
            "model.tiny: hidden_size 33 must be an even multiple of num_heads 4: choose for "
            "example hidden_size=256",
        ),
        (
            "trainer: {group_size: 1000000000}",
            "trainer.group_size: got 1000000000; needs a whole number, at least 1, at most 1048576 "
            "(default 8)",
        ),
        (
            "trainer: {groups_per_step: 65536, group_size: 64}",
            "trainer: groups_per_step=65536 and group_size=64 make 4,194,304 attempts a step, "
            "which are all in memory at its end: choose smaller values, 1,048,576 attempts at most",
        ),
        (
            "agents: {critic: {frozen: true}}",
            "agents.critic: `frozen` is not a key of an agent: write `train: false` for an agent "
            "whose weights stay fixed, and `train: true` for one that learns",
        ),
    ],
)
def test_one_wrong_value_gives_one_line(yaml_line, expected):
    assert refusal(f"{DOORS}{yaml_line}\n") == [f"r.yaml: {expected}"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("{}", "environment.type: missing; choose one of "),
        (
            "{type: test_door}",
            "environment.type: got 'test_door'; did you mean test_doors? choose one of ",
        ),
        ("{type: [1]}", "environment.type: got [1]; choose one of "),
        ("null", "environment.type: missing; choose one of "),
        ("5", "environment: got 5; it is a section, set its keys, such as environment.type"),
        (
            "{type: test_doors, slick: true}",
            "environment.slick: unknown key for environment.type=test_doors; it is an option of "
            "test_ice",
        ),
        (
            "{type: test_doors, num_door: 3}",
            "environment.num_door: unknown key; did you mean environment.num_doors?",
        ),
        (
            "{type: test_doors, num_doors: 30}",
            "environment.num_doors: got 30; needs a whole number, at least 2, at most 9 (default "
            "3)",
        ),
        (
            "{type: test_ice, size: x}",
            "environment.size: got 'x'; needs a whole number or one of random (default 4)",
        ),
        (
            "{type: test_ice, max_actions: 0}",
            "environment.max_actions: got 0; needs a whole number, at least 1 (default 20)",
        ),
    ],
)
def test_environment_problems_are_about_the_chosen_type(environment, expected):
    (line,) = refusal(f"environment: {environment}\n")
    assert line.startswith(f"r.yaml: {expected}")
    if expected.endswith("choose one of "):
        assert "test_doors, test_ice" in line


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("sampling: {top_p: 0.9}", "sampling.top_p, top_k and min_p truncate"),
        ("trainer: {group_size: 1}", "trainer.group_size is 1: set it to 2 or more"),
        (
            "algorithm: {entropy_target: 0.5}",
            "algorithm.entropy_target needs an entropy bonus, but its weight",
        ),
        (
            "trainer: {minibatches: 5}",
            "trainer.minibatches=5 is more than trainer.groups_per_step=4",
        ),
        (
            "model: {name: other, tiny: {hidden_size: 64}}",
            "model.tiny is set but model.name is 'other'",
        ),
        (
            "model: {name: tiny, tiny: {context_length: 64}}",
            "leaves no room for a prompt in model.tiny.context_length=64",
        ),
        (
            "engine: {kv_cache_tokens: 128}\nsampling: {max_new_tokens: 200}",
            "does not fit engine.kv_cache_tokens=128",
        ),
        ("run: {overwrite: true, dir: .}", "run.overwrite would delete"),
        (
            "critic: {coef: 1.0}",
            "critic is set, but algorithm.name=grpo does not use it: remove it, or choose ppo "
            "or turn_ppo",
        ),
        (
            "process_reward: {beta: 0.1}",
            "process_reward is set, but algorithm.name=grpo does not use it: remove it, or "
            "choose prime",
        ),
        (
            "algorithm: {name: ppo}\ntrainer: {steps: 5}\ncritic: {pretrain_steps: 5}",
            "leaves no step of trainer.steps=5 for the policy",
        ),
        (
            "algorithm: {name: maxrl}\nagent: {format_penalty: 0.1}",
            "no reward may be below 0, but agent.format_penalty is 0.1: set it to 0",
        ),
        (
            "algorithm: {kl_in: reward}",
            "its weight algorithm.kl_coef is 0: set kl_coef (0.001, say) or remove kl_in",
        ),
        (
            "algorithm: {kl_in: reward, kl_coef: 0.1, kl: k3+}",
            "works by its gradient, and a reward has no gradient: choose kl=k3",
        ),
        (
            "algorithm: {advantage: gdpo, kl_in: reward, kl_coef: 0.1}",
            "compares the reward's named parts",
        ),
        (
            "algorithm: {importance: token_tis}",
            "but old_logprobs is rollout: set old_logprobs=recomputed, or importance=none",
        ),
        (
            "algorithm: {train_observations: true}",
            "old_logprobs is rollout: set old_logprobs=recomputed, or train_observations=false",
        ),
        (
            "algorithm: {train_observations: true, old_logprobs: recomputed, "
            "importance: token_tis}",
            "importance=token_tis can't weigh them: set importance=none",
        ),
        (
            "algorithm: {name: decoupled_ppo, importance: token_tis, old_logprobs: recomputed}",
            "weighs with proximal over rollout policy already",
        ),
        (
            "algorithm: {kl_coef: 0.1, reference: base}",
            "with its adapters off, but model.lora has none: set model.lora.rank=16",
        ),
        ("algorithm: {importance_floor: 0.5}", "does nothing with importance=none"),
    ],
)
def test_contradictions_name_both_sides(lines, expected):
    (line,) = refusal(f"{DOORS}{lines}\n")
    assert line.startswith("r.yaml: ")
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; a recipe needs at least"),
        ("# only a comment\n", "is empty; a recipe needs at least"),
        (
            "- 1\n- 2\n",
            "a recipe is a mapping of sections such as `model:` and `environment:`, not a list",
        ),
        (
            "hello",
            "a recipe is a mapping of sections such as `model:` and `environment:`, not a single "
            "value",
        ),
        ("a: [1\n", "not valid YAML"),
        (f"{DOORS}run: {{seed: 1, seed: 2}}\n", "line 2: not valid YAML: found duplicate key seed"),
        (f"{DOORS}{DOORS}", "line 2: not valid YAML: found duplicate key environment"),
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0)"),
        (f"{DOORS}trainer: {{steps: !!python/object:os.x 1}}\n", "line 2: not valid YAML"),
        (
            f"{DOORS}run: {{seed: '${{run.nothing}}'}}\n",
            "run.seed: Interpolation key 'run.nothing' not found",
        ),
        (f"{DOORS}run: {{seed: '???'}}\n", "run.seed: "),
        (
            f"{DOORS}model: <YOUR_MODEL_PATH>\n",
            "model: <YOUR_MODEL_PATH> is a placeholder: give the value",
        ),
        (f"{DOORS}tasks: {{train: [<YOUR_DATA>/train.jsonl]}}\n", "is a placeholder"),
    ],
)
def test_a_file_that_is_no_recipe(text, expected):
    (line,) = refusal(text)
    assert line.startswith("r.yaml: ")
    assert expected in line


def test_a_step_lasts_longer_than_a_page_may_hang():
    browser = "environment: {type: browser, url: 'http://127.0.0.1/', deadline_s: 30}\n"
    (line,) = refusal(f"{browser}agent: {{step_timeout_s: 30}}\n")
    assert "agent.step_timeout_s=30 ends a step before environment.deadline_s=30 " in line
    Path("r.yaml").write_text(f"{browser}agent: {{step_timeout_s: 40}}\n")
    load_config("r.yaml", [])


def test_every_problem_is_told_at_once():
    lines = refusal("trainer: {steps: x, grop_size: 2}\nmodel: {dtype: float33}\n")
    assert len(lines) == 4
    assert {line.split(":")[1].strip() for line in lines} == {
        "environment.type",
        "trainer.steps",
        "trainer.grop_size",
        "model.dtype",
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.steps",
            "override 'trainer.steps': write it as key.subkey=value, for example trainer.steps=10",
        ),
        ("=3", "override '=3': write it as key.subkey=value"),
        ("trainer..steps=1", "override 'trainer..steps=1': write it as key.subkey=value"),
        (".steps=1", "override '.steps=1': write it as key.subkey=value"),
        ("trainer[0]=1", "override 'trainer[0]=1': write it as key.subkey=value"),
        ("trainer.steps=", "override trainer.steps=: nothing after `=`"),
        ("trainer.betas=[0.9", "override trainer.betas=[0.9: not valid YAML"),
        (
            "trainer.grop_size=3",
            "override: trainer.grop_size: unknown key; did you mean trainer.group_size?",
        ),
        ("steps=3", "override: steps: unknown key; did you mean trainer.steps?"),
        (
            "trainer.steps.x=1",
            "override: trainer.steps.x: unknown key; trainer.steps is a single value",
        ),
        ("trainer.steps=x=y", "override: trainer.steps: got 'x=y'; needs a whole number"),
        ("trainer.steps=5 5", "override: trainer.steps: got '5 5'; needs a whole number"),
        ("trainer=null", "override: trainer: is an empty section"),
        ("trainer=3", "override: trainer: got 3; it is a section"),
        (
            "environment.type=test_door",
            "override: environment.type: got 'test_door'; did you mean test_doors?",
        ),
        (
            "environment.slick=true",
            "override: environment.slick: unknown key for environment.type=test_doors",
        ),
        (
            "agent.action_separator=",
            "override: agent.action_separator: got ''; needs a text, at least 1 long",
        ),
        ("run.name=", "override: run.name: got ''; the name becomes a folder"),
        ("run.dir=", "override: run.dir: got an empty path"),
        (
            "run.seed=${trainer.nothing}",
            "override: run.seed: Interpolation key 'trainer.nothing' not found",
        ),
    ],
)
def test_a_wrong_override_is_blamed_and_not_the_file(override, expected):
    (line,) = refusal(DOORS, override)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        (DOORS, "tasks.self_play.options.largest=5", "override: tasks.self_play.family: missing"),
        (
            DOORS + "tasks: held_out.jsonl\n",
            "tasks.self_play.options.largest=5",
            "override: tasks.self_play.family: missing",
        ),
        ("trainer: {steps: 3}\n", "environment.size=3", "override: environment.type: missing"),
        (
            DOORS + "tasks: {self_play: {options: {smallest: 1}}}\n",
            "tasks.self_play.options.largest=5",
            "r.yaml: tasks.self_play.family: missing",
        ),
    ],
)
def test_what_a_section_lacks_is_blamed_on_who_wrote_the_section(written, override, expected):
    lines = refusal(written, override)
    assert any(line.startswith(expected) for line in lines), lines
    assert not any("agent." in line for line in lines), "no keys of an agent that was not chosen"


def test_the_file_is_blamed_for_what_the_file_says():
    assert refusal(f"{DOORS}trainer: {{grop_size: 3}}\n", "trainer.steps=5")[0].startswith(
        "r.yaml: trainer.grop_size"
    )


@pytest.mark.parametrize("recipe", ["nothing-like-this", "missing.yaml", "folder/missing.yml"])
def test_unknown_recipe(recipe):
    with pytest.raises(ConfigError, match="packaged recipes"):
        load_config(recipe)


def test_a_folder_is_no_recipe_but_names_the_file_in_it():
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    with pytest.raises(ConfigError, match=r"is a folder: use run/config\.yaml"):
        load_config("run")


def test_unknown_name_errors_are_config_errors():
    with pytest.raises(UnknownNameError):
        load_config("nothing-like-this")


def test_no_pydantic_location_or_text_leaks():
    with pytest.raises(ConfigError) as caught:
        build_config(
            {"environment": {"type": "test_ice", "size": {"a": 1}}, "run": {"threads": "x"}}, []
        )
    assert "int" not in str(caught.value).replace("integer", "").split()
    assert "Input should" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


def test_a_cold_start_needs_an_environment_whose_solver_plays():
    written = "tasks: t.jsonl\nagent: {type: single_turn}\nrewards: [exact_match]\n"
    lines = refusal(written, "cold_start.episodes=10")
    assert any("has no environment: set cold_start.episodes=0" in line for line in lines), lines
