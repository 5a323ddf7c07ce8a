"""Which intermediate tensors of pointwise chains a fusing compiler never writes to memory.

>>> fused_tensors(program, rules)  # 5 = gelu(4) is read by a dropout of the same shape alone
frozenset({5})

A tensor is fused where a pointwise op or a cast makes it, one pointwise op or cast reads it, once, in the same phase and to
a result of the same shape, and nothing else needs it (no backward pass, no output, no gradient). So every link of a chain is
decided by the program alone, and the prices of ops stay separate: the maker does not write the tensor, the reader does not
read it. The place of a pin or a relay between them (:mod:`solver_shard.constraints`) makes no difference: it hands on what it
got. What torch.compile's Inductor fuses beyond this is not counted: prologues and epilogues of matrix products and
reductions, several readers in one kernel, tensors that are written but not read back.

**Price.** Each op takes the longer of its operations and of the bytes that it still moves, so a chain costs at least what one
fused kernel would. Where a reshard changes the layout between maker and reader there is a collective between the two, no kernel
can hold both, and the copy pays for writing the tensor and reading it back (``Reshard.traffic_ns``).

**Memory** is not changed: a fused tensor still counts its bytes, so the peak is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from solver_shard.constraints import places
from solver_shard.program import Program
from solver_shard.rulebook.rule import Rule

FUSED_FAMILIES = frozenset({"pointwise", "cast"})


def fused_tensors(program: Program, rules: Sequence[Rule]) -> frozenset[int]:
    """Positions of the fused tensors; ``rules`` has one rule per op."""
    pointwise = [rule.family in FUSED_FAMILIES for rule in rules]
    needed = {*program.outputs, *program.gradients.values()}
    producers, readers, handing = program.producers(), program.readers(), places(program)
    found: set[int] = set()
    for t in readers:
        if t not in producers or not pointwise[producers[t][0]]:
            continue
        chain = [t]  # the tensor, and what places hand on of it
        while chain[-1] in handing:
            chain += program.ops[handing[chain[-1]]].results
        reading = [i for i, j in readers.get(chain[-1], ()) if rules[i].needs(j)]
        if needed.intersection(chain) or len(reading) != 1:
            continue
        maker, reader = producers[t][0], reading[0]
        if not pointwise[reader] or program.ops[maker].phase is not program.ops[reader].phase:
            continue
        if program.tensors[t].shape == program.tensors[program.ops[reader].results[0]].shape:
            found.update(chain)
    return frozenset(found)
