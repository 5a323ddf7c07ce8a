from __future__ import annotations
import re, ast, subprocess, shutil, collections
from pathlib import Path
from patches import PATCHES, MOVES, TEXT
def run(ROOT, PKG, have, out, target, home, src, resolve, OLD, NEWMOD):
    newmods = set()
    def dotted_map():
        pairs = {}
        for (m, n), (m2, n2) in home.items(): pairs[f"{m}.{n}"] = f"{m2}.{n2}"
        for m, m2 in NEWMOD.items(): pairs[m] = m2
        for old in {m.rpartition(".")[0] for m in OLD}: pass
        return pairs
    pairs = dotted_map()
    folders = {"frontends": "trace", "rulebook": "rules", "choice": "graph", "study": "analysis", "propagation": "shardy"}
    rx = re.compile(r"solver_shard(?:\.\w+)+")
    def dots(text):
        def sub(mt):
            parts = mt.group(0).split(".")
            for k in range(len(parts), 1, -1):
                key = ".".join(parts[:k])
                if key in pairs: return ".".join([pairs[key], *parts[k:]])
            if len(parts) >= 2 and parts[1] in folders and f"solver_shard.{parts[1]}" in pairs: return ".".join([pairs[f"solver_shard.{parts[1]}"], *parts[2:]])
            return mt.group(0)
        return rx.sub(sub, text)
    paths = {f"solver_shard/{o}": f"solver_shard/{n}" for o, n in target.items()}
    prx = re.compile(r"solver_shard/[\w/]+\.py")
    bases = collections.defaultdict(set)
    for o, n in target.items(): bases[Path(o).name].add(n)
    def base_of(rel):
        def sub(mt):
            b = mt.group(0)
            ns = bases.get(b)
            if not ns or len(ns) > 1: return b
            n = next(iter(ns))
            name = Path(n).name
            return n if name == "__init__.py" else name
        return sub
    def docs(text):
        text = dots(text)
        return prx.sub(lambda m: paths.get(m.group(0), m.group(0)), text)
    # package
    for h in have: (PKG / h).unlink()
    for rel, text in out.items():
        p = PKG / rel; p.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(l if re.match(r"\s*(from|import) solver_shard", l) else docs(l) for l in text.splitlines(keepends=True))
        text = re.sub(r"(?<![\w/.])\w+\.py\b(?!\w)", base_of(rel), text)
        p.write_text(text)
    for o, n in MOVES:
        if (ROOT / o).exists():
            (ROOT / n).parent.mkdir(parents=True, exist_ok=True)
            for f in sorted((ROOT / o).iterdir()) if (ROOT / o).is_dir() else [ROOT / o]:
                d = (ROOT / n / f.name) if (ROOT / o).is_dir() else ROOT / n
                d.parent.mkdir(parents=True, exist_ok=True); shutil.move(f, d)
    for rel, changes in PATCHES.items():
        p = PKG / rel; text = p.read_text()
        for a, b in changes:
            if a is None: text = text.rstrip("\n") + b
            else:
                if a not in text: print("!! patch", rel, repr(a[:60]))
                text = text.replace(a, b)
        p.write_text(text)
    for d in sorted(PKG.rglob("*"), reverse=True):
        if d.is_dir() and d.name != "__pycache__" and not [x for x in d.iterdir() if x.name != "__pycache__"]: shutil.rmtree(d)
    # readers
    for p in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("experiments/**/*.py")]):
        text = p.read_text(); tree = ast.parse(text); lines = text.splitlines(keepends=True)
        edits = []; inlined = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "solver_shard":
                groups = collections.defaultdict(list)
                for a in node.names:
                    local = a.asname or a.name
                    r = resolve(node.module, a.name)
                    if r is None: groups[node.module].append((a.name, local)); continue
                    if r[0] == "def": groups[r[1]].append((r[2], a.asname or a.name) if (a.asname or r[2] != a.name) else (r[2], r[2]))
                    else:
                        pk, _, leaf = r[1].rpartition(".")
                        groups[pk].append((leaf, local))
                ind = " " * node.col_offset
                noqa = re.search(r"#\s*noqa.*", "".join(lines[node.lineno - 1:node.end_lineno]))
                tail = "  " + noqa.group(0).strip() if noqa else ""
                new = "".join(f"{ind}from {m} import {', '.join(n if n == l else f'{n} as {l}' for n, l in sorted(set(ns)))}{tail}\n" for m, ns in sorted(groups.items()))
                edits.append((node.lineno, node.end_lineno, new))
        for a, b, new in sorted(edits, reverse=True): lines[a - 1:b] = [new]
        rest = "".join(lines)
        # other mentions: not in import lines
        rest = "".join(l if re.match(r"\s*from solver_shard", l) else docs(l) for l in rest.splitlines(keepends=True))
        if rest != text: p.write_text(rest)
    for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("experiments/*.md"), ROOT / "pyproject.toml", *PKG.rglob("*.toml")]:
        text = p.read_text(); new = docs(text) if p.name != "pyproject.toml" else text
        if new != text: p.write_text(new)
    for rel, changes in TEXT.items():
        p = ROOT / rel; text = p.read_text()
        for a, b in changes:
            if a not in text: print("!! text", rel, repr(a[:60]))
            text = text.replace(a, b)
        p.write_text(text)
    packages = sorted({".".join(p.parent.relative_to(ROOT).parts) for p in PKG.rglob("*.py") if "__pycache__" not in str(p)})
    for q in packages:
        init = ROOT / q.replace(".", "/") / "__init__.py"
        if not init.exists(): init.write_text(""); print("new", init)
    py = ROOT / "pyproject.toml"; text = py.read_text()
    text = re.sub(r"packages = \[\n    \"solver_shard\",.*?\n\]", "packages = [\n" + "".join(f'    "{q}",\n' for q in packages) + "]", text, flags=re.S, count=1)
    py.write_text(text)
