"""Text changes after the move: {file: [(old, new), ...]}."""
PATCHES = {
    "rules/families/nn.py": [(None, "\n\nFAMILIES = (*IMAGE_FAMILIES, *NN_FAMILIES)\n")],
    "rules/families/stablehlo.py": [(None, "\n\nFAMILIES: tuple[Family, ...] = (*PLAIN_FAMILIES, *PRODUCT_FAMILIES, *INDEX_FAMILIES, *CALL_FAMILIES)\n")],
}
MOVES = [("solver_shard/frontends/presets", "solver_shard/trace/presets"), ("rules", "solver_shard/rules")]
TEXT = {}
