"""Every model type of the installed transformers release: planned, refused with a reason, or failed.

    python experiments/model_types.py [TYPE ...] [--stage run|trace|plan] [--again] [--markdown experiments/model_types.md]

Each type's default config is made small by its numbers of layers (widths stay as published, for nothing has weights), written as a
config.json holds it and loaded as ``solve --config`` does, with the head that a config without ``architectures`` gets; then traced,
lowered and solved on two devices. What has no loss is planned forward only, and the table says why. Some default configs lack what
every published one has, or contradict themselves; what they need is listed below. All libraries are loaded once, every type has a copy
of that process with limits of time and memory, and rows are kept in a file, so that the study can be stopped and goes on where it was.

Stages: ``run`` only runs a step on fake tensors, ``trace`` traces it, ``plan`` goes to the end.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import logging
import os
import resource
import signal
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

BATCH, SEQ, MESH = 4, 32, "2"
LAYERS: tuple[int | None, ...] = (1, 2, 4, None)
"""Tried in this order, until the class can be built and runs: some need several kinds of layers, or one for each output; None: all."""
CPU_SECONDS, WALL_SECONDS, BYTES = 120, 900, 12 << 30
SOLVER_SECONDS, SOLVER_WORK, GAP, MEMORY = 5.0, 0.1, 0.1, "64TiB"
FOLDER = Path(__file__).resolve().parent

_COUNTS = (
    *("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "depth", "num_decoder_layers", "n_layer", "n_layers"),
    *("num_encoder_layers", "num_hidden_groups", "max_depth", "resampler_depth", "aligner_num_add_layers", "n_recurrent_layers"),
    *("memory_attention_num_layers", "decoder_num_hidden_layers", "decoder_num_layers", "perceiver_resampler_num_layers"),
    *("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers", "num_global_layers", "folding_trunk_num_hidden_layers"),
    *("l_layers", "x_layers", "r_layers", "num_conv_layers_per_block", "num_attention_layers", "num_fov_head_layers"),
    *("n_input_layers", "n_output_layers", "num_blocks"),
)
"""Settings that count layers."""


def small(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with few layers, as a config.json has it."""
    named = [name for name in _COUNTS if not (name == "num_layers" and "depths" in config)]
    counts = {config[name] for name in named if isinstance(config.get(name), int) and config[name] > layers}
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, dict) and "layer" in name and value and all(str(key).isdigit() for key in value):
            found[name] = {key: item for key, item in value.items() if int(key) < layers}
        elif isinstance(value, dict):
            found[name] = small(value, layers)
        elif name in named and isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(value, layers)
        elif name in ("depths", "num_block_repeats") and isinstance(value, list):
            found[name] = [min(layers, count) for count in (value[:layers] if "patch_sizes" in config else value)]
        elif name == "num_kv_shared_layers" and isinstance(value, int):
            found[name] = layers if value >= max(counts, default=0) else 0
        elif name == "depth_coefficient":
            found[name] = min(value, 1.0)
        elif isinstance(value, list) and len(value) in counts:
            found[name] = value[:layers]
    if "n_recurrent_layers" in config and "n_input_layers" in config:
        found["num_hidden_layers"] = sum(found[name] for name in ("n_input_layers", "n_recurrent_layers", "n_output_layers"))
        found["layer_types"] = config["layer_types"][: found["num_hidden_layers"]]
    names = config.get("out_features")
    if (
        names
        and counts
        and all(isinstance(name, str) for name in names)
        and "depths" not in config
        and max(int(name.removeprefix("stage")) for name in names if name != "stem") > layers
    ):
        found = {key: value for key, value in found.items() if key not in ("out_indices", "stage_names")}
        found["out_features"] = sorted({f"stage{max(1, layers - i)}" for i in range(len(names))})
    return found


def config_of(kind: str, layers: int | None) -> dict[str, Any]:
    """The small config of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**MISSING.get(kind, {}))
    raw = json.loads(made.to_json_string(use_diff=False))
    raw = raw if layers is None else small(raw, layers)
    if (raw.get("backbone_config") or {}).get("model_type") == "timm_backbone":
        raw["backbone_config"] = {
            "model_type": "resnet",
            "out_features": ["stage2", "stage3", "stage4"][-len(made.backbone_config.out_indices or [4]) :],
        }
    return {**raw, "model_type": kind, "architectures": [HEADS[kind]] if kind in HEADS else None}


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}
MISSING: dict[str, dict[str, Any]] = {
    **{
        kind: {"prediction_length": 8, "context_length": 16, "num_time_features": 2}
        for kind in ("informer", "autoformer", "time_series_transformer")
    },
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: {"text_config": _PARTIAL} for kind in ("glm46v", "glm4v", "glm_image", "glmga")},
    **dict.fromkeys(("glm4v_text", "glm_image_text"), _PARTIAL),
    "glm4v_moe_text": {"head_dim": 128, **_PARTIAL},
    "glm4v_moe": {"text_config": {"head_dim": 128, **_PARTIAL}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _ROPE | {"mrope_section": [16, 16, 16, 16]}}},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": _ROPE | {"mrope_section": [16, 16, 16, 16]}},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "depth_pro": {"image_size": 1536},
    "dpt": {"num_labels": 8},
    **{kind: {"vision_config": {"image_size": 384}} for kind in ("idefics3", "smolvlm", "modernvbert", "colmodernvbert")},
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "chameleon": {"vocabulary_map": {"<image>": 0, **{f"IMGIMG{chr(65 + i)}Z": 4 + i for i in range(8)}}},
    "emu3": {"vocabulary_map": {"<image>": 0, "<|extra_200|>": 1, **{f"<|visual token {i:06d}|>": 4 + i for i in range(8)}}},
    **{kind: {"rope_parameters": {"full_attention": _ROPE}} for kind in ("cohere_compass_text",)},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "aria": {"vision_config": {"image_size": 490, "patch_size": 14}},
    "glm_ocr": {"text_config": {"rope_parameters": _PARTIAL["rope_parameters"] | {"partial_rotary_factor": 1.0}}},
    "glm_ocr_text": {"rope_parameters": _PARTIAL["rope_parameters"] | {"partial_rotary_factor": 1.0}},
    **{kind: {"projector_config": {"encoder_hidden_size": 1024}} for kind in ("granite_speech", "granite_speech_plus")},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 11}},
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron": {"num_key_value_heads": 8},
    **{kind: {"vocab_size": 32} for kind in ("wav2vec2-bert", "wav2vec2-conformer")},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 768}}},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "4/8",
        "vision_config": {"image_size": 384, "patch_size": 16},
    },
    "pp_doclayout_v2": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "vitmatte": {
        "backbone_config": {"model_type": "vitdet", "num_channels": 4, "hidden_size": 384, "num_attention_heads": 6}
        | {"out_features": ["stage12"], "image_size": 512}
    },
    "omdet-turbo": {"apply_layernorm_after_vision_backbone": False, "encoder_in_channels": [512, 1024, 2048]},
    "llama4": {"vision_config": {"hidden_size": 1408}},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_shape": [4, 8]},
    "beit": {"num_labels": 8},
}
"""What a config of this type cannot do without."""

HEADS = {
    "informer": "InformerForPrediction", "autoformer": "AutoformerForPrediction",
    "time_series_transformer": "TimeSeriesTransformerForPrediction",
}  # fmt: skip
"""Heads that no auto class has."""


SAMPLES = {"encodec": 3200}
"""Of sound, for a model that goes through it step by step."""


def study(kind: str, stage: str) -> dict[str, Any]:
    """One model type, with labels and, where that does not go, forward only."""
    row: dict[str, Any] = {"type": kind, "stage": stage, "result": "failed"}
    start = time.process_time()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        for labels in (True, False):
            reason = _small_enough(row, kind, stage, labels)
            if reason is None:
                row["result"] = "plans" if labels else "plans forward only"
                break
            row["training" if labels else "forward"] = reason
        else:
            row["result"] = _result(row["forward"])
    except _TimeOut:
        row["result"], row["forward"] = "timed out", f"no plan in {CPU_SECONDS} CPU seconds"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return row | {"seconds": round(time.process_time() - start, 1)}


def _small_enough(row: dict[str, Any], kind: str, stage: str, labels: bool) -> str | None:
    """Why there is no plan at the smallest number of layers at which the class runs on all that it reads, or None."""
    last = None  # what is said at the published depth
    runs: list[tuple[int | None, Any]] = []
    for layers in LAYERS:
        made = _loaded(kind, layers, labels)
        if isinstance(made, str):
            last = made
            if any(words in made for words in _OF_VALUES + _OF_LOSSES):
                break
            continue
        runs.append((layers, made))
        if not _leaves_out(*made[:2]) or layers == LAYERS[-2]:
            break
    if not runs:
        return last
    whole = [run for run in runs if not _leaves_out(*run[1][:2])]
    row["layers"], (model, inputs, name) = (whole or runs)[0]
    row["class"], row["inputs"] = type(model).__name__, sorted(inputs)
    row["text_alone"] = _leaves_out(model, inputs)
    return _planned(row, model, inputs, name, stage, labels)


_OF_VALUES = ("by the values of a tensor", "is not installed", "has no forward", "which a config says nothing of")
_OF_LOSSES = ("computes no loss", "not trainable", "raining is not", "not support training", "support training", "without a loss")
"""What is said where more layers make no difference."""


def _result(reason: str) -> str:
    """Refused in one line of clear words, or failed."""
    return "refused" if reason.startswith(("InputError", "TraceError")) and "\n" not in reason else "failed"


def _leaves_out(model: Any, inputs: Any) -> bool:
    """Whether a model that reads pictures or sound with its text is given text alone."""
    from solver_shard.tracing.example_inputs import MODALITIES, StepRequest

    asked = StepRequest(model=model, name="", batch=1, seq=1, dtype=None, labels=False)
    read = [name for name, part in MODALITIES.items() if name in asked.arguments and asked.has(part)]
    return bool(read) and "input_ids" in asked.arguments and not any(name in inputs for name in read)


def _loaded(kind: str, layers: int | None, labels: bool) -> Any:
    """Model, inputs and name where a step of it runs, or why it does not."""
    from solver_shard import SolverShardError
    from solver_shard.tracing.huggingface import load
    from solver_shard.tracing.torch import check

    try:
        raw = config_of(kind, layers)
        try:
            made = load(raw, batch=BATCH, seq=SAMPLES.get(kind), labels=labels)
        except SolverShardError as error:
            if "with --seq" not in str(error):
                raise
            try:
                made = load(raw, batch=BATCH, seq=SEQ, labels=labels)
            except SolverShardError as limited:
                if "learned positions" not in str(limited):
                    raise
                made = load(raw, batch=BATCH, seq=int(str(limited).rsplit(" ", 1)[1]), labels=labels)
        check(*made[:2], name=made[2], forward_only=not labels)
        return made
    except SolverShardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"


def _planned(row: dict[str, Any], model: Any, inputs: Any, name: str, stage: str, labels: bool) -> str | None:
    """Why there is no plan, or None."""
    from solver_shard import SolverShardError, optimize, trace

    try:
        if stage == "run":
            return None
        program = trace(model, inputs, name=name, forward_only=not labels)
        row["ops"] = len(program.ops)
        if stage == "plan":
            limits = {"time_limit": SOLVER_SECONDS, "work_limit": SOLVER_WORK, "gap": GAP, "workers": 1}
            plan = optimize(program, mesh=MESH, memory=MEMORY, forward_only=not labels, **limits)
            row["step"] = str(plan).split("step time")[1].split("\n")[0].strip()
    except SolverShardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    return None


class _TimeOut(BaseException):
    pass


def _stop(*_: Any) -> None:
    raise _TimeOut


def types() -> list[str]:
    """Model types that some auto class makes."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    made: set[str] = set()
    for name, mapping in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and name.startswith("MODEL"):
            made |= set(mapping)
    return sorted(made & set(CONFIG_MAPPING_NAMES))


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The latest row of every type."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {row["type"]: row for row in rows}


def work(kind: str, stage: str, path: Path) -> None:
    """In a process of its own: one type, whose row is appended to the file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    row = study(kind, stage)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")


def fork(kind: str, stage: str, path: Path) -> None:
    """``work`` in a copy of this process, which has all libraries loaded; a type at which it dies has failed."""
    child = os.fork()
    if not child:
        try:
            work(kind, stage, path)
        finally:
            os._exit(0)
    end = time.monotonic() + WALL_SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    if results(path).get(kind, {}).get("stage") != stage:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"type": kind, "stage": stage, "result": "failed", "forward": "the process died"}) + "\n")


def preload() -> None:
    """Everything that all types need, and one trace, so that copies of this process begin where types differ."""
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto  # noqa: F401

    from solver_shard import optimize, trace
    from solver_shard.tracing.huggingface import load

    model, inputs, name = load(config_of("llama", 1), batch=BATCH, seq=SEQ)
    optimize(trace(model, inputs, name=name), mesh=MESH, workers=1)
    gc.collect()
    gc.freeze()


KINDS = {
    "needs a library that is not installed": "is not installed",
    "decides by values that are not known before the step": "by the values of a tensor",
    "reads what a config says nothing of": "which a config says nothing of",
    "has no forward of its own": "has no forward",
    "the library's own class or default config does not run": "",
}
"""Kinds of refusals, by words of their reasons; the last is that of all others."""


def markdown(rows: dict[str, dict[str, Any]], total: int) -> str:
    """The record; what went to an early stage only is said to run or to trace, not to plan."""
    verbs = {"run": "runs", "trace": "traces"}
    said = {kind: row["result"].replace("plans", verbs.get(row.get("stage", ""), "plans")) for kind, row in rows.items()}
    counts = collections.Counter(said.values())
    planned = sum(count for result, count in counts.items() if result.startswith("plans"))
    refusals = collections.Counter(_kind_of(row) for row in rows.values() if row["result"] == "refused")
    text = sorted(kind for kind, row in rows.items() if row.get("text_alone"))
    lines = [
        str(__doc__).split("\n\n")[0],
        "",
        f"torch {version('torch')}, transformers {version('transformers')}; made by `python experiments/model_types.py`, which says what "
        "each column is.",
        "",
        f"{total} types that an auto class makes, {len(rows)} in this table: {planned} plan ({100 * planned / max(1, len(rows)):.1f}%).",
        "",
        "| result | types |",
        "|---|---|",
        *(f"| {result} | {count} |" for result, count in counts.most_common()),
        *(f"| refused: {kind} | {count} |" for kind, count in refusals.most_common()),
        "",
        '"Plans": traced, lowered and solved with the loss that its labels give; "plans forward only": no training step plans, and '
        'the reason says why; "refused": one line that says why, and what to give instead. A row is of the last run of its type: one that '
        "planned is not made again when other types are mended.",
        "",
        f"Planned for text alone, as the pictures or sound that their configs say of do not go through the class ({len(text)}): "
        f"{', '.join(text)}.",
        "",
        "| type | class | reads | result | ops | step | why not (training; forward) |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, row in sorted(rows.items()):
        told = list(dict.fromkeys(" ".join(row[key].split())[:300].replace("|", "/") for key in ("training", "forward") if key in row))
        reads = ", ".join(row.get("inputs", ())) or "-"
        cells = [kind, row.get("class", "-"), reads, said[kind], str(row.get("ops", "-")), row.get("step", "-"), "; ".join(told)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _kind_of(row: dict[str, Any]) -> str:
    return next(kind for kind, words in KINDS.items() if words in row["forward"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", nargs="*", help="default: all")
    parser.add_argument("--stage", choices=("run", "trace", "plan"), default="plan")
    parser.add_argument("--results", type=Path, default=FOLDER / "model_types.jsonl")
    parser.add_argument("--again", action="store_true", help="those, too, of which an earlier run did not get a plan")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    kinds = options.type or types()
    done = {kind for kind, row in results(options.results).items() if row.get("stage") == options.stage}
    if options.again:
        done = {kind for kind in done if results(options.results)[kind]["result"] != "plans"}
    left = [kind for kind in kinds if options.type or kind not in done]
    if left:
        preload()
    for kind in left:
        fork(kind, options.stage, options.results)
        row = results(options.results)[kind]
        print(kind, row["result"], row.get("ops", "-"), row.get("seconds", "-"), flush=True)
    rows = {kind: row for kind, row in results(options.results).items() if kind in kinds}
    print(collections.Counter(row["result"] for row in rows.values()))
    if options.markdown:
        options.markdown.write_text(markdown(rows, len(types())), encoding="utf-8")


if __name__ == "__main__":
    main()
