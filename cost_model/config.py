"""Read a model's shape from a Hugging Face config.json."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cost_model.architecture import ModelArchitecture, WeightType
from cost_model.config_keys import ConfigKeys, shown
from cost_model.dtypes import WEIGHT_BYTES
from cost_model.errors import InputError
from cost_model.families import FAMILIES, FamilyReader
from cost_model.fields import checked_name, schema_error
from cost_model.files import read_text
from cost_model.quantization import quantised_formats

_MAX_CONFIG_BYTES = 1 << 20

_DTYPES: dict[str, WeightType] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FORMATS, _FORMATS_FILE = "quantization_config", "hf_quant_config.json"
# Of a model that also sees or hears, the keys that its text part may leave to the whole.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", _FORMATS)


def architecture_from_folder(path: Path) -> ModelArchitecture:
    """The shape of the model in a folder with a config.json (or of that file itself), named after the folder.
    Where a config.json says nothing of formats, hf_quant_config.json beside it may (NVIDIA Model Optimizer).

    Raises
    ------
    InputError : no readable config.json, or one that `architecture_from_config` refuses
    """
    file = path / "config.json" if path.is_dir() else path
    source = str(file)
    config = _json_object(file)
    name = checked_name(file.resolve().parent.name, source, remedy="rename the folder")
    found = architecture_from_config(config, name or "model", source)
    if config.get(_FORMATS) is not None or file.name != "config.json":
        return found
    formats = formats_beside(file.parent)
    return found if formats is None else found.model_copy(update=quantised_formats(*formats, found.layers))


def formats_beside(folder: Path) -> tuple[object, str, str] | None:
    """What hf_quant_config.json says of formats, that file, and the key in it; None: there is none."""
    file = folder / _FORMATS_FILE
    if not file.is_file():
        return None
    formats = _json_object(file).get("quantization")
    return (
        ({"quant_method": "modelopt", **formats} if isinstance(formats, dict) else formats),
        str(file),
        "quantization",
    )


def _json_object(file: Path) -> dict[str, Any]:
    source = str(file)
    text = read_text(file, _MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(source, f"line {error.lineno}", f"is not JSON ({error.msg})", "correct it") from None
    except (RecursionError, ValueError):
        raise InputError(source, "", "is not a model's config", "take the model's own config.json") from None
    if not isinstance(config, dict):
        raise InputError(source, "", "is not a JSON object", "take the model's own config.json")
    return config


def architecture_from_config(config: dict[str, Any], name: str, source: str) -> ModelArchitecture:
    """The shape that a Hugging Face config describes.

    Parameters
    ----------
    config : the keys of config.json; model_type is one of `cost_model.families.FAMILIES`
    name : what to call the model
    source : the file, for errors

    Raises
    ------
    InputError : unknown model_type or dtype; a key missing or not a positive whole number; heads that do not
        divide; an unknown quantisation, post-norm OPT or biased Llama, which nothing here models
    """
    known = _known_family(ConfigKeys(config, source))
    reader = text_part(ConfigKeys(config, source))
    shape = known.read(reader)
    dtype = _dtype(reader)
    width = WEIGHT_BYTES[dtype]
    formats: dict[str, Any] = {
        "weight_type": dtype,
        "weight_bytes": width,
        "activation_bytes": width,
        "kv_value_bytes": width,
    }
    quantization = reader.raw.get(_FORMATS)
    if quantization is not None:
        formats |= quantised_formats(quantization, source, f"{reader.prefix}{_FORMATS}", shape["layers"])
    try:
        return ModelArchitecture(name=name, family=known.family, **shape, **formats)
    except ValidationError as error:
        raise schema_error(error, source, "take the model's own config.json") from None


def _known_family(config: ConfigKeys) -> FamilyReader:
    """The family that model_type names."""
    kind = config.raw.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    near = difflib.get_close_matches(str(kind)[:100], FAMILIES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    problem = "is missing" if kind is None else f"{shown(kind)} is not known"
    raise config.error("model_type", problem, f"{hint}known: {', '.join(FAMILIES)}")


def text_part(config: ConfigKeys) -> ConfigKeys:
    """The keys of the language model: those of text_config, if there is one.

    Raises
    ------
    InputError : text_config is something else
    """
    whole, text = config.raw, config.raw.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise config.error("text_config", "is not a JSON object", "take the model's own config.json")
    raw = {key: whole[key] for key in _OF_THE_WHOLE if key in whole}
    raw |= {key: value for key, value in text.items() if value is not None or key not in raw}
    return ConfigKeys(raw, config.source, "text_config.")


def _dtype(config: ConfigKeys) -> WeightType:
    """Format of the weights: `dtype` or `torch_dtype`, 16 bits where neither is given."""
    key = next((k for k in ("dtype", "torch_dtype") if config.raw.get(k) is not None), None)
    if key is None:
        return "bf16"
    dtype = str(config.raw[key]).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.error(key, f"{shown(config.raw[key])} is not known", f"known: {', '.join(_DTYPES)}")
    return _DTYPES[dtype]
