"""The recipe: one tree that describes a whole run. It is read from YAML and overrides, and checked
before anything is created."""

from agentevo.config.agents import AgentSection, EnvironmentAgentSection
from agentevo.config.algorithm import AlgorithmKeys, AlgorithmSection
from agentevo.config.memory import MemorySection
from agentevo.config.model import LoraSection, ModelSection, TinyModel
from agentevo.config.parallel import ParallelSection
from agentevo.config.recipe import (
    RunConfig,
    build_config,
    changed_to_yaml,
    config_keys,
    key_variants,
    load_config,
    to_tree,
    to_yaml,
    with_defaults,
)
from agentevo.config.rollout import RolloutSection
from agentevo.config.sections import (
    ColdStartSection,
    CriticSection,
    EngineSection,
    ProcessRewardSection,
    ProfileSection,
    RewardModelSection,
    RunSection,
    TrainerSection,
)
from agentevo.config.sft import SFTSection, check_sft
from agentevo.config.vision import VisionSection
from agentevo.runtime.section import Section

__all__ = [
    "AgentSection",
    "AlgorithmKeys",
    "AlgorithmSection",
    "ColdStartSection",
    "CriticSection",
    "EngineSection",
    "EnvironmentAgentSection",
    "LoraSection",
    "MemorySection",
    "ModelSection",
    "ParallelSection",
    "ProcessRewardSection",
    "ProfileSection",
    "RewardModelSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SFTSection",
    "Section",
    "TinyModel",
    "TrainerSection",
    "VisionSection",
    "build_config",
    "changed_to_yaml",
    "check_sft",
    "config_keys",
    "key_variants",
    "load_config",
    "to_tree",
    "to_yaml",
    "with_defaults",
]
