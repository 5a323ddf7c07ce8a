"""One step of a plan in real processes of this machine, talking by gloo: started, watched, and ended whatever happens.

>>> ran = run_in_processes(plan, subject, timeout=300)
>>> ran.traffic
{('all_reduce', ('dp',)): (4, 16384), ...}

Every process is a fresh interpreter that reads plan, model and inputs from a folder, applies the plan (``solver_shard.apply``), takes one
step and leaves there what it holds: its parts of the gradients and of the updated parameters, and the collectives that went through
torch's dispatcher meanwhile. They are counted there, not where the plan's runtime says that it called them; what its recorder says must be
the same, and the process groups must have been asked for as many. What devices hold is put together here, by the plan's layouts; devices
that should hold the same must.
"""

from __future__ import annotations

import datetime
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from solver_shard.errors import InputError, InternalError, SolverShardError
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.ops.shards import coordinates, join
from solver_shard.plan.io import plan_from_json, plan_to_json
from solver_shard.plan.plan import Plan
from solver_shard.runtime.collectives import Recorded
from solver_shard.verification.subject import StepResult, Subject
from solver_shard.verification.verdict import Traffic

_POLL = 0.05
_GRACE = 5.0
_TAIL = 1500
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


def run_in_processes(
    plan: Plan, subject: Subject, *, rate: float, max_norm: float, timeout: float
) -> tuple[StepResult, Mapping[str, torch.Tensor], Traffic]:
    """Take one step in as many processes as the mesh has devices.

    Args:
        rate: of the gradient step.
        max_norm: to which gradients are clipped, where the plan clips them.
        timeout: seconds until they are ended.

    Returns:
        what the step returned and its gradients, the updated parameters, and the collectives of device 0.

    Raises:
        InputError: the model cannot be handed to another process, or a process refused it.
        InternalError: the processes disagree, or one found the plan not executable.
        SolverShardError: a process failed in another way, or none answered in time.
    """
    if subject.model is None or subject.inputs is None:
        raise InputError("real processes need the model itself, and only its program was given; give the module, or leave --processes out")
    with tempfile.TemporaryDirectory(prefix="solver-shard-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan_to_json(plan), encoding="utf-8")
        given = [subject.given(k) for k in range(len(subject.values))]
        try:
            what = {"model": subject.model, "inputs": subject.inputs, "given": given, "loss_fn": subject.loss_fn, "seed": subject.seed}
            torch.save({**what, "rate": rate, "max_norm": max_norm}, folder / "subject.pt")
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"the model or its loss cannot be handed to another process: {error}; define them at the top level of a module"
            ) from None
        _watch(folder, plan.mesh.size, timeout)
        held = [torch.load(folder / f"held.{rank}.pt", weights_only=True) for rank in range(plan.mesh.size)]
    return _together(plan, subject, held)


def _watch(folder: Path, count: int, timeout: float) -> None:
    """Run all processes to their end; the first that fails ends the others."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *(path for path in sys.path if path), os.getcwd()])
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # a host name need not lead anywhere
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (folder / f"log.{rank}").open("wb") as log:
                words = [sys.executable, "-m", "solver_shard.verification.processes", str(folder), str(rank), str(count), str(timeout)]
                processes.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment))
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed:
                time.sleep(2 * _POLL)  # a process that falls takes others with it; the first to say why is the one to hear
                break
            if time.monotonic() > end:
                waiting = [rank for rank, process in enumerate(processes) if process.poll() is None]
                raise SolverShardError(
                    f"processes {', '.join(map(str, waiting))} of {count} gave no answer within {timeout:g} s; give more --timeout, or "
                    "leave --processes out to simulate all devices in one process"
                )
            time.sleep(_POLL)
        _raise(folder, processes)
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _raise(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """The error of the first process that says one; of the first that failed, what it last wrote."""
    known: dict[str, type[SolverShardError]] = {"InputError": InputError, "InternalError": InternalError}
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    for rank in failed:
        said = folder / f"error.{rank}"
        if said.exists():
            kind, _, text = said.read_text(encoding="utf-8").partition("\n")
            raise known.get(kind, SolverShardError)(f"process {rank}: {text}")
    if failed:
        text = (folder / f"log.{failed[0]}").read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        raise SolverShardError(
            f"process {failed[0]} of {len(processes)} ended with code {processes[failed[0]].poll()}: {text or 'it said nothing'}"
        )


def _together(plan: Plan, subject: Subject, held: Sequence[Mapping[str, Any]]) -> tuple[StepResult, Mapping[str, torch.Tensor], Traffic]:
    """Whole tensors from what the devices hold."""
    mesh, planned = plan.mesh, {tensor.name: tensor for tensor in plan.tensors}

    def whole(what: str, name: str, layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
        return join(tuple(parts[what][name] for parts in held), layout, shape, mesh)

    outputs = []
    for k in range(len(subject.values)):
        outputs.append(
            {
                name: join(tuple(parts["outputs"][k][name] for parts in held), planned[name].layout, planned[name].shape, mesh)
                for name in (plan.tensors[t].name for t in plan.outputs)
                if name in held[0]["outputs"][k]
            }
        )
        for name in held[0]["written"][k]:
            stored = planned[name]
            outputs[-1][f"updated({name})"] = join(tuple(p["written"][k][name] for p in held), stored.layout, stored.shape, mesh)
    gradients = {
        name: whole("gradients", name, plan.tensors[g].layout, plan.tensors[g].shape)
        for name, g in plan.gradients.items()
        if held[0]["gradients"]
    }
    parameters = {name: whole("parameters", name, planned[name].layout, planned[name].shape) for name in held[0]["parameters"]}
    counts = [{(kind, axes): n for kind, axes, n, _ in parts["traffic"]} for parts in held]
    for rank, found in enumerate(counts):
        if found != counts[0]:
            raise InternalError(f"process {rank} ran other collectives than process 0: {found}, {counts[0]}")
    traffic = {(kind, tuple(axes)): (n, nbytes) for kind, axes, n, nbytes in held[0]["traffic"]}
    return StepResult(outputs=tuple(outputs), gradients=gradients), parameters, traffic


class Counted(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch is not checked
    """While open, counts the collectives of this process, by kind and by the mesh axes along which their group lies.

    What DTensor calls inside its ops is counted, too. Two other witnesses are asked in ``agree``: whoever recorded what it called, and the
    process groups, which number what they are asked for.

    Attributes:
        found, nbytes: by kind and axes, how many and how many bytes this device called them with: of a gathered output, else of the buffer.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.found: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._issued = issued()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it makes of the op comes here again, on plain tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d"):
            name = func._schema.name.partition("::")[2]
            if name in _KINDS:
                kind = _KINDS[name]
                moved = result if kind == "all_gather" else args[0]
                key = kind, self._axes(args[-1])
                self.found[key] += 1
                self.nbytes[key] += moved.nbytes
            elif not name.startswith(("wait", "_wrap")):
                key = name, ()
                self.found[key] += 1
        return result

    def agree(self, recorded: Sequence[Recorded]) -> None:
        """Hold what was counted against what was recorded, and against how many the process groups were asked for.

        Raises:
            InternalError: they differ; the message has both.
        """
        said: Counter[tuple[str, tuple[str, ...]]] = Counter()
        sizes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for entry in recorded:
            key = "all_reduce" if entry.kind == "exchange" else entry.kind, entry.axes
            said[key] += entry.count
            sizes[key] += entry.count * entry.nbytes
        if said != self.found or sizes != self.nbytes:
            raise InternalError(
                f"the runtime recorded the collectives {_shown(said, sizes)}, and what ran is {_shown(self.found, self.nbytes)}; "
                "please report this"
            )
        asked = issued() - self._issued
        if asked != self.found.total():
            raise InternalError(
                f"{self.found.total()} collectives were counted, and the process groups were asked for {asked}; please report this"
            )

    def _axes(self, group: Any) -> tuple[str, ...]:
        """Along which axes the members of a group differ."""
        from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks

        ranks = get_process_group_ranks(_resolve_process_group(group) if isinstance(group, str) else group)
        at = [coordinates(self.mesh)[rank] for rank in ranks]
        return tuple(name for a, name in enumerate(self.mesh.names) if len({where[a] for where in at}) > 1)


def issued() -> int:
    """How many collectives the process groups of this process have been asked for, all together; they number them."""
    from torch.distributed.distributed_c10d import _world

    return sum(group._get_sequence_number_for_group() for group in _world.pg_map)


def _shown(counts: Mapping[tuple[str, tuple[str, ...]], int], nbytes: Mapping[tuple[str, tuple[str, ...]], int]) -> str:
    rows = (f"{n} {kind} on {','.join(axes)} of {nbytes[kind, axes]:,} B" for (kind, axes), n in sorted(counts.items()) if n)
    return ", ".join(rows) or "none"


def _work(folder: Path, rank: int, count: int, timeout: float) -> None:
    """What one process does."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    from solver_shard.runtime.apply import apply, recorded_collectives, reseed, runtime_of
    from solver_shard.runtime.optimizer import ShardedOptimizer, clip_grad_norm_

    torch.set_num_threads(1)
    plan = plan_from_json((folder / "plan.json").read_text(encoding="utf-8"))
    try:
        subject = torch.load(folder / "subject.pt", weights_only=False)  # written by the process that started this one
    except (AttributeError, ImportError) as error:
        raise InputError(
            f"the model cannot be read in another process: {error}; define its class and its loss in a module that can be imported, not in "
            "the script that runs, or leave --processes out"
        ) from None
    model, given = subject["model"], subject["given"]
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=limit)
    try:
        mesh = init_device_mesh("cpu", plan.mesh.whole.shape, mesh_dim_names=plan.mesh.whole.names)
        sharded = apply(model, plan, mesh, inputs=subject["inputs"], loss_fn=subject["loss_fn"])
        optimizer = None
        if plan.options.optimizer != "none" and not plan.options.forward_only:
            optimizer = ShardedOptimizer(sharded, torch.optim.SGD, lr=subject["rate"])
            optimizer.state_dict()  # its masters are set from the parameters here, which is done once and is no part of a step
        reseed(sharded, subject["seed"])
        buffers = {name: b._local_tensor for name, b in sharded.named_buffers() if f"updated({name})" in {t.name for t in plan.tensors}}
        before, written = {name: b.clone() for name, b in buffers.items()}, []
        given = [runtime_of(sharded).given.placed(inputs) for inputs in given]
        recorded_collectives(sharded, reset=True)
        outputs, counted = [], Counted(plan.mesh)
        with counted:
            for inputs in given:
                for name, buffer in buffers.items():
                    buffer.copy_(before[name])  # every microbatch is held against a step of its own
                made = sharded(**inputs)
                if not plan.options.forward_only:
                    (made / len(given)).backward()
                outputs.append(_outputs(plan, made))
                caches = {name: value.to_local() for name, value in inputs.items() if isinstance(value, DTensor)}
                written.append({name: value.clone() for name, value in (buffers | caches).items()})
            if plan.options.clip:
                clip_grad_norm_(sharded, subject["max_norm"])
            if optimizer is not None:
                optimizer.step()
        recorded = recorded_collectives(sharded)
        counted.agree(recorded)
        _set_apart(counted, recorded)
        trained = {name: p for name, p in sharded.named_parameters(remove_duplicate=False) if name in plan.gradients}
        layouts = plan.layouts
        gradients = {name: _local(p.grad, plan.tensors[plan.gradients[name]].layout, plan.mesh, name) for name, p in trained.items()}
        parameters = {name: _local(p.data, layouts[name], plan.mesh, name) for name, p in trained.items() if optimizer is not None}
        held = {
            "outputs": [{n: v.to_local() if isinstance(v, DTensor) else v for n, v in found.items()} for found in outputs],
            "written": written,
            "gradients": gradients,
            "parameters": parameters,
            "traffic": [(kind, axes, n, counted.nbytes[kind, axes]) for (kind, axes), n in sorted(counted.found.items()) if n],
        }
        torch.save(held, folder / f"held.{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _set_apart(counted: Counted, recorded: Sequence[Recorded]) -> None:
    """Tokens that are brought to where their experts are by sums: their rows would lie there, and no plan lists these collectives."""
    for entry in recorded:
        if entry.kind == "exchange":
            counted.found["all_reduce", entry.axes] -= entry.count
            counted.nbytes["all_reduce", entry.axes] -= entry.count * entry.nbytes


def _outputs(plan: Plan, made: Any) -> dict[str, torch.Tensor]:
    """What the applied model returned, by the plan's names."""
    names = [plan.tensors[t].name for t in plan.outputs if not plan.tensors[t].name.startswith("updated(")]
    values = [made] if isinstance(made, torch.Tensor) else list(made.values() if isinstance(made, Mapping) else made)
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def _local(tensor: Any, layout: Layout, mesh: Mesh, name: str) -> torch.Tensor:
    """A device's part of a DTensor, which must have the planned layout."""
    if tuple(tensor.placements) != tuple(layout.to_dtensor(mesh.shape)):
        raise InternalError(f"{name!r} or its gradient is laid out as {tensor.placements}, the plan says {layout}")
    local: torch.Tensor = tensor.to_local().detach().clone()
    return local


def main() -> None:
    """``python -m solver_shard.verification.processes FOLDER RANK COUNT TIMEOUT``: one of the processes."""
    folder, rank, count, timeout = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    try:
        _work(folder, rank, count, timeout)
    except SolverShardError as error:
        (folder / f"error.{rank}").write_text(f"{type(error).__name__}\n{error}", encoding="utf-8")
        sys.exit(1)


if __name__ == "__main__":
    main()
