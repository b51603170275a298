"""AgentRL's scripts and agent_config.yml as recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentevo.cli.main import main
from agentevo.config import build_config
from agentevo.config.agentrl import read_script, recipe_of
from agentevo.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "agentrl"


def recipe(words, folder=EXAMPLE, **options):
    """The recipe of a command with these flags, and the remarks."""
    return recipe_of(read_script(f"python src/main.py {words}", "r"), folder, **options)


def test_the_example_becomes_a_recipe_that_is_read(capsys):
    assert main(["config", "from-agentrl", str(EXAMPLE / "minirl.sh"), "--run-name", "mine"]) == 0

    said = capsys.readouterr()
    config = build_config(yaml.safe_load(said.out), folder=EXAMPLE)
    assert (config.run.name, str(config.run.dir)) == ("mine", "output/mine")
    assert config.algorithm.name == "minirl" and config.algorithm.advantage == "rloo"
    assert config.algorithm.aggregation == "seq-mean-token-sum"
    assert (config.trainer.steps, config.trainer.group_size) == (1000, 8)

    # 48 rows on each of 8 GPUs in groups of 4, in groups of 8 attempts.
    assert config.trainer.groups_per_step == 12

    (manager,) = config.agent.tools
    assert (manager.type, manager.url) == ("mcp_manager", "http://127.0.0.1:8014/mcpapi")

    context = config.agent.context
    browse = config.agent.browse
    assert (context.strategy, context.max_tokens) == ("discard_results", 128768 - 1024)
    assert browse.models == ("reader", "reader_2") and browse.browse_tools == ("fetch_url", "visit")
    assert config.rewards[0].models == ("judge",)
    assert config.remote_models["judge"].base_url == "http://127.0.0.1:38888/v1"


def test_no_key_and_no_password_is_written_and_their_variables_are_told(capsys):
    assert main(["config", "from-agentrl", str(EXAMPLE / "minirl.sh")]) == 0
    said = capsys.readouterr()
    for secret in ("sk-of-the", "secret"):
        assert secret not in said.out + said.err
    for variable in ("STORE_PASSWORD", "READER_API_KEY", "READER_2_API_KEY", "JUDGE_API_KEY"):
        assert f"${{env:{variable}}}" in said.out and variable in said.err
    assert "note: --tp_size 4: trainer.parallel.tensor splits the model" in said.err


def test_switches_and_defaults_are_those_of_agentrl():
    tree, _ = recipe("--model_name_or_path m --train_file t.jsonl --loss_calculater GRPO")
    assert tree["algorithm"] == {
        "name": "grpo",
        "aggregation": "token-mean",
        "advantage": "rloo",
    }
    assert tree["agent"]["max_turns"] == 25 and tree["sampling"]["max_new_tokens"] == 8196
    assert tree["trainer"]["learning_rate"] == 1e-6

    tree, _ = recipe("--loss_calculater MINIRL --epsilon 0.3 --importance_weight_cap_ratio 2")
    assert tree["algorithm"]["token_level_loss"] is True
    assert (tree["algorithm"]["clip_low"], tree["algorithm"]["cap_ratio"]) == (0.3, 2)

    tree, remarks = recipe("--mcp_manager_url http://h:1/sse --mcp_auth_token sesame --modl x")
    (entry,) = tree["agent"]["tools"]
    assert entry["type"] == "mcp" and entry["transport"] == "sse"
    assert entry["api_key"] == "${env:MCP_AUTH_TOKEN}" and "sesame" not in str((tree, remarks))
    assert any("--modl is no flag" in one and "left out" in one for one in remarks)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train_file '<YOUR_TRAIN_FILE>'", "--train_file: <YOUR_TRAIN_FILE> is to be filled in"),
        ("--max_steps many", "--max_steps: got 'many'; needs a number"),
        ("--repetition_early_stop_times 1.5", "needs a whole number"),
        ("--loss_calculater CISPO", "choose one of MINIRL, GRPO, GSPO"),
        ("--loss_calculater CrossEntropy", "this is supervised training: `agentevo sft`"),
        ("--preferred_sampling_params '{'", "--preferred_sampling_params: got '{'"),
        ("--presence_penalty 0.5", "leave it out"),
        ("--loss_calculater MINIRL --strict_in_bound maybe", "needs true or false"),
        ("--agent_config_path no.yml", "no.yml"),
        ("--run_name 'my run", "can't be read as a shell's"),
    ],
)
def test_what_can_not_be_translated_is_refused(words, said):
    with pytest.raises(ConfigError) as refusal:
        recipe(words)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("browse_agent: {models: []}", "needs a list `models`"),
        ("scorer_agent: {models: [{base_url: u}]}", r"scorer_agent.models[0]: needs `model`"),
        ('scorer_agent: {models: [{model: m, base_url: "<YOUR_URL>"}]}', "are to be filled in"),
        ("[1]", "needs the sections browse_agent and scorer_agent"),
        ("a: [", "no YAML"),
    ],
)
def test_a_wrong_agent_config_is_named(text, said, tmp_path):
    file = tmp_path / "agent_config.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        recipe("--train_file t.jsonl", agent_config=file)
    assert said in str(refusal.value) and str(file) in str(refusal.value)


def test_a_refused_script_prints_no_recipe(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("echo hello\n")
    assert main(["config", "from-agentrl", str(script)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no command with AgentRL's main.py" in said.err
