"""All rule families by name; rows of a rules file name one of them."""

from __future__ import annotations

from collections.abc import Mapping

from solver_shard.rulebook import (
    families_attention,
    families_dims,
    families_experts,
    families_image,
    families_index,
    families_matrices,
    families_nn,
    families_stablehlo,
    families_stablehlo_calls,
    families_stablehlo_index,
    families_stablehlo_products,
    families_views,
)
from solver_shard.rulebook.table import Family

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for module in (
        families_dims,
        families_views,
        families_image,
        families_index,
        families_nn,
        families_attention,
        families_matrices,
        families_experts,
        families_stablehlo,
        families_stablehlo_products,
        families_stablehlo_index,
        families_stablehlo_calls,
    )
    for family in module.FAMILIES
}
