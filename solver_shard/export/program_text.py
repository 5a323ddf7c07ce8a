"""The fixed parts of the Python files that exporters write."""

from __future__ import annotations

HEAD = '''"""{name} on {mesh}, as parallelize_module styles and FSDP2 calls; written by solver-shard.

Planned from: {source}.
Use parallelize(model, mesh) in your program; run by itself, this file takes training steps with random weights and inputs:

    torchrun --nproc-per-node N FILE --steps 2
"""
'''

MESH = """MESH_NAMES = {names}
MESH_SHAPE = {shape}
SOURCE = {source}
"""

SHARED = '''class Lay:
    """Lays a tensor out for the modules of one layer that read it, once: one collective, and one for its gradient."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.left = 0
        self.tensor = self.made = None

    def __call__(self, tensor: torch.Tensor, mesh: DeviceMesh, placement) -> DTensor:
        if tensor is not self.tensor:
            made = DTensor.from_local(tensor, mesh, [placement], run_check=False).redistribute(placements=[Replicate()])
            self.tensor, self.made, self.left = tensor, made, self.readers
        made = self.made
        self.left -= 1
        if not self.left:
            self.tensor = self.made = None
        return made


class SharedInput(ParallelStyle):
    """A style for a module whose input is laid out together with that of others."""

    def __init__(self, style: ParallelStyle, lay: Lay, placement) -> None:
        super().__init__()
        self.style, self.lay, self.placement = style, lay, placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        made = self.style._apply(module, device_mesh)
        made.register_forward_pre_hook(lambda _, args: (self.lay(args[0], device_mesh, self.placement), *args[1:]), prepend=True)
        return made
'''

PLAIN = '''def wrap(model: nn.Module, data: DeviceMesh) -> None:
    """Average the gradients over the data axes."""
    replicate(model, mesh=data)
'''

FSDP = '''

def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\\*", "[0-9]+"), name) is not None


def wrap(model: nn.Module, data: DeviceMesh) -> None:
    """Cut the parameters over the data axes; inner modules first."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = list(model.parameters())  # so that no id is given twice

    def cut(parameter: nn.Parameter) -> Shard:
        return Shard(next((dim for pattern, dim in CUT_DIMS.items() if _matches(pattern, names.get(id(parameter), ""))), 0))

    modules = dict(model.named_modules())
    for pattern, frees in FULLY_SHARD.items():
        for path, module in modules.items():
            if _matches(pattern, path):
                fully_shard(module, mesh=data, reshard_after_forward=frees, shard_placement_fn=cut)
    del kept
'''

MAIN = '''def device_mesh(device: str) -> DeviceMesh:
    """The plan's mesh; the job needs as many processes as it has devices."""
    return init_device_mesh(device, MESH_SHAPE, mesh_dim_names=MESH_NAMES)


def local_inputs(inputs: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The part of the batch that this process computes."""
    found = {{}}
    for name, value in inputs.items():
        for axis in INPUT_AXES if value.dim() else ():
            value = value.chunk(mesh[axis].size())[mesh[axis].get_local_rank()]
        found[name] = value.contiguous()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    from solver_shard.export.rebuild import rebuild

    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    try:
        mesh = device_mesh(given.device)
        built = rebuild(SOURCE, seed=0, forward_only={forward_only})
        model = parallelize(built.model.to(given.device), mesh)
        inputs = {{name: value.to(given.device) for name, value in local_inputs(dict(built.inputs), mesh).items()}}
        # foreach kernels do not mix DTensors with the plain tensors of modules that are not parallel
        optimizer = {optimizer}
        for step in range(given.steps):
            with torch.set_grad_enabled(optimizer is not None):
                output = model(**inputs)
            if optimizer is None:
                shown = "forward pass done"
            else:
                loss = built.loss(output)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.detach().clone()
                for axis in INPUT_AXES:
                    dist.all_reduce(value, op=dist.ReduceOp.SUM, group=mesh[axis].get_group())
                    value /= mesh[axis].size()
                shown = f"loss {{value.item():.6f}}"
            if dist.get_rank() == 0:
                print(f"step {{step}}: {{shown}}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
