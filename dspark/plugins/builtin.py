"""The built-in plugin: registers everything that ships, through the same hooks as any other.

Factories and settings are references: building the catalog imports no component, and so neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark.capabilities import (
    CalibratorCapabilities,
    Capabilities,
    DrafterCapabilities,
    EstimatorCapabilities,
    GammaCapabilities,
    HeadCapabilities,
    KernelCapabilities,
    PresetCapabilities,
    SchedulerCapabilities,
    TargetCapabilities,
    VerifierCapabilities,
)
from dspark.plugins.hookspecs import hookimpl
from dspark.plugins.kinds import Register

DSPARK_API = 1


def version() -> str:
    """Version of this distribution."""
    import dspark

    return dspark.__version__


def _offer(register: Register, name: str, module: str, config: str, capabilities: Capabilities) -> None:
    """A component in a module of its own, which has ``build`` and the config class."""
    register(name, f"{module}:build", config=f"{module}:{config}", capabilities=capabilities)


@hookimpl
def dspark_register_targets(register: Register) -> None:
    """Transformers' causal language models."""
    _offer(register, "hf", "dspark.targets.hf", "HFTargetConfig", TargetCapabilities(ragged=True, taps=True))


@hookimpl
def dspark_register_drafters(register: Register) -> None:
    """Plain decoding, prompt lookup, trained drafters over the target's features, and smaller models."""
    capabilities = DrafterCapabilities(max_gamma=0, point_mass=True)
    _offer(register, "none", "dspark.drafters.none", "NoneConfig", capabilities)
    _offer(register, "ngram", "dspark.drafters.ngram", "NgramConfig", DrafterCapabilities(point_mass=True))
    _offer(register, "dspark", "dspark.drafters.dspark", "DSparkConfig", DrafterCapabilities(needs_taps=True))
    _offer(register, "eagle3", "dspark.drafters.eagle3", "Eagle3Config", DrafterCapabilities(needs_taps=True))
    _offer(register, "draft-model", "dspark.drafters.draft_model", "DraftModelConfig", DrafterCapabilities())


@hookimpl
def dspark_register_sequential_heads(register: Register) -> None:
    """The heads of METHOD section 2, and none."""
    plain, stateful = HeadCapabilities(), HeadCapabilities(stateful=True)
    _offer(register, "none", "dspark.heads.none", "NoHeadConfig", plain)
    _offer(register, "markov", "dspark.heads.markov", "MarkovConfig", plain)
    _offer(register, "gated", "dspark.heads.gated", "GatedConfig", plain)
    _offer(register, "rnn", "dspark.heads.rnn", "RNNConfig", stateful)


@hookimpl
def dspark_register_confidence_estimators(register: Register) -> None:
    """A table by position, averages learned while decoding, and a trained linear head."""
    _offer(register, "constant", "dspark.confidence.constant", "ConstantConfig", EstimatorCapabilities())
    _offer(register, "online", "dspark.confidence.online", "OnlineConfig", EstimatorCapabilities(shared_state=True))
    _offer(register, "linear", "dspark.confidence.linear", "LinearConfig", EstimatorCapabilities(needs_hidden=True))


@hookimpl
def dspark_register_calibrators(register: Register) -> None:
    """None, and Sequential Temperature Scaling."""
    _offer(register, "identity", "dspark.confidence.identity", "IdentityConfig", CalibratorCapabilities())
    _offer(register, "sts", "dspark.confidence.sts", "STSConfig", CalibratorCapabilities())


@hookimpl
def dspark_register_schedulers(register: Register) -> None:
    """The schedulers of METHOD section 4."""
    by_cost = SchedulerCapabilities(needs_cost=True)
    for name, config in (("causal", "CausalConfig"), ("lookahead", "LookaheadConfig"), ("lagged", "LaggedConfig")):
        _offer(register, name, f"dspark.scheduling.{name}", config, by_cost)
    retrospective = SchedulerCapabilities(anticipates=True, needs_cost=True)
    _offer(register, "global", "dspark.scheduling.global_", "GlobalConfig", retrospective)
    for name, config in (("fixed", "FixedConfig"), ("threshold", "ThresholdConfig"), ("off", "OffConfig")):
        _offer(register, name, f"dspark.scheduling.{name}", config, SchedulerCapabilities())


@hookimpl
def dspark_register_gamma_policies(register: Register) -> None:
    """A fixed block, and the choice of gamma by measured cost and history, with guard and early exit."""
    _offer(register, "static", "dspark.scheduling.gamma_static", "StaticConfig", GammaCapabilities())
    adaptive = GammaCapabilities(needs_cost=True, needs_entropy=True)
    _offer(register, "adaptive", "dspark.scheduling.gamma_adaptive", "AdaptiveConfig", adaptive)


@hookimpl
def dspark_register_verifiers(register: Register) -> None:
    """The exact acceptance rules: greedy, rejection and coupled."""
    anything = VerifierCapabilities(exact_under="any", pathwise=True)
    _offer(register, "greedy", "dspark.verifiers.greedy", "GreedyConfig", anything)
    _offer(register, "rejection", "dspark.verifiers.rejection", "RejectionConfig", VerifierCapabilities())
    _offer(register, "coupled", "dspark.verifiers.coupled", "CoupledConfig", anything)


@hookimpl
def dspark_register_kernels(register: Register) -> None:
    """The operations of a round on a GPU: in Triton, and in torch for comparison."""
    dtypes = ("bfloat16", "float16", "float32")
    for op in ("bias_sample", "reject_sample"):
        kind = op.partition("_")[0]
        for variant, devices in (("triton", ("cuda",)), ("reference", ("cpu", "cuda", "mps"))):
            suffix = op if variant == "triton" else f"{kind}_reference"
            capabilities = KernelCapabilities(devices, dtypes)
            register(f"{op}.{variant}", f"dspark.ops.library:build_{suffix}", config=None, capabilities=capabilities)


@hookimpl
def dspark_register_presets(register: Register) -> None:
    """Drafters that their authors published for well-known targets, at their repositories' default branch."""
    for size in ("4b", "8b", "14b"):
        target = f"Qwen/Qwen3-{size.upper()}"
        register(
            f"dspark-qwen3-{size}",
            _checkpoint_preset(f"deepseek-ai/dspark_qwen3_{size}_block7"),
            config=None,
            capabilities=PresetCapabilities(target=target, models=(target,)),
        )


def _checkpoint_preset(source: str) -> Callable[[object, object], dict[str, object]]:
    """Factory of a preset that drafts with a checkpoint."""
    return lambda config, context: {"drafter": "dspark", "drafter_config": {"checkpoint": source}}
