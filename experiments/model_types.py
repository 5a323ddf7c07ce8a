"""Every model type of the installed transformers release: planned, refused with a reason, or failed.

    python experiments/model_types.py [TYPE ...] [--stage run|trace|plan] [--again] [--markdown experiments/model_types.md]

Each type's default config is made small by its numbers of layers (widths stay as published, for nothing has weights), written as a
config.json holds it and loaded as ``solve --config`` does, with the head that a config without ``architectures`` gets; then traced,
lowered and solved on two devices. What has no loss is planned forward only, and the table says why. Results are kept in a file
beside this one while the study runs, so that it can be stopped and goes on where it was; every process is left after some models or
at its limit of memory, and no model gets more than 60 CPU seconds.

Stages: ``run`` only runs a step on fake tensors, ``trace`` traces it, ``plan`` goes to the end.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

BATCH, SEQ, MESH = 4, 32, "2"
LAYERS = (1, 2, 4)
"""Tried in this order, until the class can be built and runs: some need several kinds of layers, or one for each output."""
CPU_SECONDS, MODELS_PER_PROCESS, BYTES_PER_PROCESS = 60, 60, 3 << 30
SOLVER_SECONDS = 5.0
FOLDER = Path(__file__).resolve().parent

_COUNTS = (
    *("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "depth", "num_decoder_layers", "n_layer", "n_layers"),
    *("num_encoder_layers", "num_hidden_groups", "max_depth", "resampler_depth", "aligner_num_add_layers", "n_recurrent_layers"),
    *("memory_attention_num_layers", "decoder_num_hidden_layers", "decoder_num_layers", "perceiver_resampler_num_layers"),
    *("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers", "num_global_layers", "folding_trunk_num_hidden_layers"),
    *("l_layers", "x_layers", "r_layers", "num_conv_layers_per_block", "num_attention_layers", "num_fov_head_layers"),
)
"""Settings that count layers."""


def small(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with few layers, as a config.json has it."""
    counts = {config[name] for name in _COUNTS if isinstance(config.get(name), int) and config[name] > layers}
    found = dict(config)
    for name, value in config.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            found[name] = {key: item for key, item in value.items() if int(key) < layers}
        elif isinstance(value, dict):
            found[name] = small(value, layers)
        elif name in _COUNTS and isinstance(value, int) and not isinstance(value, bool):
            found[name] = min(value, layers)
        elif name == "depths" and isinstance(value, list):
            found[name] = [min(layers, count) for count in value]
        elif isinstance(value, list) and len(value) in counts:
            found[name] = value[:layers]
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


def config_of(kind: str, layers: int) -> dict[str, Any]:
    """The small config of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**MISSING.get(kind, {}))
    raw = small(json.loads(made.to_json_string(use_diff=False)), layers)
    if (raw.get("backbone_config") or {}).get("model_type") == "timm_backbone":
        raw["backbone_config"] = {
            "model_type": "resnet",
            "out_features": ["stage2", "stage3", "stage4"][-len(made.backbone_config.out_indices or [4]) :],
        }
    return {**raw, "model_type": kind, "architectures": [HEADS[kind]] if kind in HEADS else None}


_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}}
MISSING: dict[str, dict[str, Any]] = {
    **{
        kind: {"prediction_length": 8, "context_length": 16, "num_time_features": 2}
        for kind in ("informer", "autoformer", "time_series_transformer")
    },
    **{kind: {"head_dim": 128} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")},
    **{kind: {"text_config": _PARTIAL} for kind in ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glm_image")},
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm_image_text"), _PARTIAL),
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "depth_pro": {"image_size": 1536},
    "dpt": {"num_labels": 8},
    "beit": {"num_labels": 8},
}
"""What a config of this type cannot do without."""

HEADS = {
    "informer": "InformerForPrediction", "autoformer": "AutoformerForPrediction",
    "time_series_transformer": "TimeSeriesTransformerForPrediction",
}  # fmt: skip
"""Heads that no auto class has."""


def study(kind: str, stage: str) -> dict[str, Any]:
    """One model type, with labels and, where that does not go, forward only."""
    row: dict[str, Any] = {"type": kind, "stage": stage}
    start = time.process_time()
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        for labels in (True, False):
            name = "training" if labels else "forward"
            for row["layers"] in LAYERS:
                reason = _one(row, kind, stage, labels, row["layers"])
                if reason is None or not any(word in reason for word in _OF_SIZES):
                    break
            if reason is None:
                row["result"] = "plans" if labels else "plans forward only"
                break
            row[name] = reason
            if labels and not any(word in reason.lower() for word in _OF_LOSSES):
                row["forward"] = reason  # forward needs what this is about, too
                row["result"] = _result(reason)
                break
        else:
            row["result"] = _result(row["forward"])
    except _TimeOut:
        row["result"] = "timed out"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return row | {"seconds": round(time.process_time() - start, 1)}


_OF_SIZES = ("is not a valid", "building ", "hidden states should be equal")
"""What is said where there are too few layers."""

_OF_LOSSES = ("loss", "label", "train", "datadependent", "dynamicoutput", "values of a tensor")
"""What is said where a step could run without its loss."""


def _result(reason: str) -> str:
    """Refused in clear words (a step on fake tensors says them by torch's exceptions), or failed."""
    said = reason.startswith("InputError") or any(
        words in reason for words in ("values of a tensor", "DataDependentOutputException", "DynamicOutputShapeException")
    )
    return "refused" if said else "failed"


def _one(row: dict[str, Any], kind: str, stage: str, labels: bool, layers: int) -> str | None:
    """Why there is no plan, or None."""
    from solver_shard import optimize
    from solver_shard.errors import SolverShardError
    from solver_shard.frontends.huggingface import load
    from solver_shard.frontends.torch import failure, trace

    try:
        raw = config_of(kind, layers)
        try:
            model, inputs, name = load(raw, batch=BATCH, labels=labels)
        except SolverShardError as error:
            if "with --seq" not in str(error):
                raise
            try:
                model, inputs, name = load(raw, batch=BATCH, seq=SEQ, labels=labels)
            except SolverShardError as limited:
                if "learned positions" not in str(limited):
                    raise
                model, inputs, name = load(raw, batch=BATCH, seq=int(str(limited).rsplit(" ", 1)[1]), labels=labels)
        row["class"] = type(model).__name__
        row["inputs"] = sorted(inputs)
        if stage == "run":
            error = failure(model, inputs, forward_only=not labels)
            return None if error is None else _reason(error)
        program = trace(model, inputs, name=name, forward_only=not labels)
        row["ops"] = len(program.ops)
        if stage == "plan":
            plan = optimize(program, mesh=MESH, time_limit=SOLVER_SECONDS, workers=1, forward_only=not labels)
            row["step"] = str(plan).split("step time")[1].split("\n")[0].strip()
    except _TimeOut:
        raise
    except SolverShardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {error}"
    return None


def _reason(error: Exception) -> str:
    """What a step that does not run says."""
    where, trace = "", error.__traceback__
    while trace is not None:
        if "/transformers/" in trace.tb_frame.f_code.co_filename:
            where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"TraceError: {type(error).__name__}: {' '.join(str(error).split())[:300]} ({where})"


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


def work(kinds: list[str], stage: str, path: Path) -> None:
    """In one process: as many types as it may do."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for kind in kinds[:MODELS_PER_PROCESS]:
        row = study(kind, stage)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=str) + "\n")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > BYTES_PER_PROCESS:
            return


def batches(kinds: list[str], path: Path) -> Iterator[list[str]]:
    """What is still to do, until nothing is; a type at which a process died has failed."""
    while left := [kind for kind in kinds if kind not in results(path)]:
        yield left
        after = results(path)
        if left[0] not in after:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"type": left[0], "result": "failed", "forward": "the process died"}) + "\n")


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The record; what went to an early stage only is said to run or to trace, not to plan."""
    verbs = {"run": "runs", "trace": "traces"}
    said = {kind: row["result"].replace("plans", verbs.get(row.get("stage", ""), "plans")) for kind, row in rows.items()}
    counts = ", ".join(f"{count} {result}" for result, count in collections.Counter(said.values()).most_common())
    lines = [
        str(__doc__).split("\n\n")[0],
        "",
        f"torch {version('torch')}, transformers {version('transformers')}, {len(rows)} types: {counts}. Made by "
        "`python experiments/model_types.py`, which says what each column is.",
        "",
        '"Runs": loaded from its config with the inputs of a step, which ran on fake tensors; "plans": traced, lowered and solved, too.',
        "",
        "| type | class | result | ops | step | why not (training; forward) |",
        "|---|---|---|---|---|---|",
    ]
    for kind, row in sorted(rows.items()):
        reasons = "; ".join(" ".join(row[key].split())[:200].replace("|", "/") for key in ("training", "forward") if key in row)
        lines.append(f"| {kind} | {row.get('class', '-')} | {said[kind]} | {row.get('ops', '-')} | {row.get('step', '-')} | {reasons} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", nargs="*", help="default: all")
    parser.add_argument("--stage", choices=("run", "trace", "plan"), default="plan")
    parser.add_argument("--results", type=Path, default=FOLDER / "model_types.jsonl")
    parser.add_argument("--again", action="store_true", help="also those that an earlier run took to another stage only")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(sys.stdin.read()), options.stage, options.results)
        return
    kinds = options.type or types()
    if options.again:
        kept = [row for row in results(options.results).values() if not (row["type"] in kinds and row.get("stage") != options.stage)]
        options.results.write_text("".join(json.dumps(row, default=str) + "\n" for row in kept), encoding="utf-8")
    for left in batches(kinds, options.results):
        command = [sys.executable, __file__, "--worker", "--stage", options.stage, "--results", str(options.results)]
        subprocess.run(command, input=json.dumps(left), text=True, check=False)
    rows = {kind: row for kind, row in results(options.results).items() if kind in kinds}
    print(collections.Counter(row["result"] for row in rows.values()))
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
