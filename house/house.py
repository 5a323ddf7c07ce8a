"""Move definitions of the package to the files that the layout names, and rewrite what reads them.

    python house.py ROOT LAYOUT.md [--emit FOLDER] [--write]

LAYOUT.md has a table row `new file | lines | old files` for every new file. Without --write: only says what collides, which circles there
are, and what is left. Needs libcst. After --write: ruff check --fix, ruff format, rewrap.py solver_shard, ruff format, mypy, tests (a
patch of an attribute that has moved shows there; experiments/expand.py wants its noqa marks again).
"""
from __future__ import annotations
import sys, re, ast, json, collections, os
from pathlib import Path
import libcst as cst
from libcst.metadata import MetadataWrapper, ScopeProvider, GlobalScope, Assignment, ImportAssignment, BuiltinAssignment
sys.path.insert(0, str(Path(__file__).parent))
from plan import moves as LAYOUT
import choices as C   # hand-written: FILES (more moves), DEFINITIONS, RENAMES, ORDER, DOCS

ROOT = Path(sys.argv[1]); PKG = ROOT / "solver_shard"; WRITE = "--write" in sys.argv

def modname(rel: str, pkg="solver_shard") -> str:
    rel = rel[:-3]
    if rel.endswith("__init__"): rel = rel[:-9].rstrip("/")
    return (pkg + "." + rel.replace("/", ".")).rstrip(".")

files = {}           # new rel -> [old rels]
for new, olds in LAYOUT.items(): files[new] = list(olds)
for new, olds in C.FILES.items():
    if olds is None: files.pop(new, None)
    else: files[new] = list(olds)
have = sorted(str(p.relative_to(PKG)) for p in PKG.rglob("*.py") if "__pycache__" not in str(p))
files = {n: [o for o in os_ if o in have] for n, os_ in files.items()}
files = {n: os_ for n, os_ in files.items() if os_}
target = {}
for new, olds in files.items():
    for o in olds:
        assert o not in target, (o, new, target[o])
        target[o] = new
missing = [h for h in have if h not in target]
if missing: print("no target for", missing); sys.exit(1)

OLD = {modname(h): h for h in have}            # old module name -> rel
NEWMOD = {m: modname(target[h]) for m, h in OLD.items()}

# ---------------------------------------------------------------- read
class Src:
    def __init__(self, mod, rel):
        self.mod, self.rel = mod, rel
        self.is_pkg = rel.endswith("__init__.py")
        self.wrapper = MetadataWrapper(cst.parse_module((PKG / rel).read_text()))
        self.tree = self.wrapper.module
        self.scopes = self.wrapper.resolve(ScopeProvider)
        self.globals = next(s for s in self.scopes.values() if isinstance(s, GlobalScope)) if self.tree.body else None
        self.doc = self.tree.get_docstring(clean=False)
        first = self.tree.body[0].body[0] if self.doc is not None else None
        self.rawdoc = first.value.value if first is not None and isinstance(first.value, cst.SimpleString) else None
        self.pieces = []      # (names, node)
        self.imports = {}     # local name -> (module, attr|None, typing_only)
        self.defs = {}
        for i, st in enumerate(self.tree.body):
            self.statement(i, st)
        self.late = []
    def statement(self, i, st):
        if isinstance(st, cst.SimpleStatementLine):
            b = st.body[0]
            if i == 0 and isinstance(b, cst.Expr) and isinstance(b.value, (cst.SimpleString, cst.ConcatenatedString)): return
            if isinstance(b, (cst.Import, cst.ImportFrom)):
                self.add_import(b, False); return
        if isinstance(st, cst.If) and isinstance(st.test, cst.Name) and st.test.value == "TYPE_CHECKING":
            rest = []
            for s in st.body.body:
                if isinstance(s, cst.SimpleStatementLine) and isinstance(s.body[0], (cst.Import, cst.ImportFrom)): self.add_import(s.body[0], True)
                else: rest.append(s)
            if rest:
                self.pieces.append((names_of(st), st))
            return
        ns = names_of(st)
        # a bare string after an assignment is its documentation: same piece
        if isinstance(st, cst.SimpleStatementLine) and isinstance(st.body[0], cst.Expr) and isinstance(st.body[0].value, (cst.SimpleString, cst.ConcatenatedString)) and self.pieces:
            self.pieces[-1] = (self.pieces[-1][0], [*aslist(self.pieces[-1][1]), st]); return
        self.pieces.append((ns, st))
    def add_import(self, b, typing):
        if isinstance(b, cst.Import):
            for a in b.names:
                name = dotted(a.name)
                local = a.asname.name.value if a.asname else name.split(".")[0]
                self.imports[(local, name if not a.asname else None)] = (name, None, typing)
        else:
            m = dotted(b.module) if b.module else ""
            assert not b.relative, self.rel
            if m == "__future__": return
            for a in b.names:
                name = a.name.value
                local = a.asname.name.value if a.asname else name
                self.imports[(local, None)] = (m, name, typing)

def aslist(x): return x if isinstance(x, list) else [x]
def dotted(n): return n.value if isinstance(n, cst.Name) else dotted(n.value) + "." + n.attr.value
def names_of(st):
    r = []
    if isinstance(st, (cst.FunctionDef, cst.ClassDef)): r.append(st.name.value)
    elif isinstance(st, cst.SimpleStatementLine):
        for b in st.body:
            if isinstance(b, cst.Assign):
                for t in b.targets: r += target_names(t.target)
            elif isinstance(b, cst.AnnAssign): r += target_names(b.target)
            elif isinstance(b, cst.TypeAlias): r.append(b.name.value)
    elif isinstance(st, (cst.If, cst.Try, cst.For, cst.With)):
        for s in st.body.body: r += names_of(s)
    return r
def target_names(t):
    if isinstance(t, cst.Name): return [t.value]
    if isinstance(t, (cst.Tuple, cst.List)): return [n for e in t.elements for n in target_names(e.value)]
    return []

src = {m: Src(m, rel) for m, rel in OLD.items()}
home = {}   # (oldmod, name) -> (newmod, newname)
for m, s in src.items():
    for ns, _ in s.pieces:
        for n in ns:
            home[m, n] = (NEWMOD[m], C.RENAMES.get(s.rel, {}).get(n, n))
# definitions that change house, with the private helpers that only they use
uses = {}  # (mod, name) -> set of global names of the same module its piece reads
def piece_reads(s):
    """piece index -> names of globals it reads."""
    owner = {}
    for k, (ns, node) in enumerate(s.pieces):
        for nd in aslist(node):
            for c in walk(nd): owner[id(c)] = k
    reads = collections.defaultdict(set)
    if s.globals is None: return reads, owner
    for a in s.globals.assignments:
        for acc in a.references:
            k = owner.get(id(acc.node))
            if k is not None: reads[k].add(a.name)
    return reads, owner
def walk(n):
    yield n
    for c in n.children: yield from walk(c)
reads = {}
for m, s in src.items():
    reads[m], s.owner = piece_reads(s)
moved_order = []
for rel, names, new in C.DEFINITIONS:
    m = modname(rel)
    if m not in src: print("!! no module", rel); continue
    s = src[m]
    where = {n: k for k, (ns, _) in enumerate(s.pieces) for n in ns}
    absent = [n for n in names if n not in where]
    if absent: print("!! not defined in", rel, absent)
    chosen = {where[n] for n in names if n in where}
    while True:
        more = set()
        for k in chosen:
            for n in reads[m][k]:
                j = where.get(n)
                if j is None or j in chosen: continue
                readers = {q for q in range(len(s.pieces)) if n in reads[m][q] and q != j}
                outside = any(v[0] == m and v[1] == n for t in src.values() if t is not s for v in t.imports.values())
                if readers <= chosen and not outside and n.startswith("_"): more.add(j)
        if not more: break
        chosen |= more
    for k in chosen:
        for n in s.pieces[k][0]:
            home[m, n] = (modname(new), C.RENAMES.get(rel, {}).get(n, n))

def resolve(module, attr):
    """What an import of the package names, in the new layout: ('def', newmod, name) | ('mod', newmod) | None for others."""
    if module.split(".")[0] != "solver_shard": return None
    if attr is not None:
        sub = f"{module}.{attr}"
        if sub in OLD and (module, attr) not in home: return ("mod", NEWMOD[sub], sub)
        if (module, attr) in home: return ("def", *home[module, attr])
        if module in src and (attr, None) in src[module].imports:   # re-exported
            mm, aa, _ = src[module].imports[attr, None]
            return resolve(mm, aa)
        if sub in OLD: return ("mod", NEWMOD[sub], sub)
        print("?? unresolved", module, attr); return ("def", NEWMOD.get(module, module), attr)
    if module in OLD: return ("mod", NEWMOD[module], module)
    return None

# ---------------------------------------------------------------- sections of new modules
class Section:
    def __init__(self, s, pieces, main): self.s, self.pieces, self.main = s, pieces, main
new = collections.defaultdict(list)
for nf, olds in files.items():
    nm = modname(nf)
    for o in olds:
        s = src[modname(o)]
        stay = [k for k, (ns, _) in enumerate(s.pieces) if not ns or home[s.mod, ns[0]][0] == nm]
        new[nm].append(Section(s, stay, True))
relof = {modname(nf): nf for nf in files}
for m, s in src.items():
    by = collections.defaultdict(list)
    for k, (ns, _) in enumerate(s.pieces):
        if ns and home[m, ns[0]][0] != NEWMOD[m]: by[home[m, ns[0]][0]].append(k)
    for nm, ks in by.items():
        new[nm].insert(0, Section(s, ks, False))
        if nm not in relof:
            relof[nm] = nm.removeprefix("solver_shard.").replace(".", "/") + ".py"

def target_of(s, name):
    """Of a global name of an old module: ('def', newmod, name) for the package's, ('ext', module, attr, alias) for others."""
    if (s.mod, name) in home: return ("def", *home[s.mod, name])
    for (local, full), (m, a, t) in s.imports.items():
        if local == name and full is None:
            r = resolve(m, a)
            return ((*r, name) if r[0] == "mod" else r) if r else ("ext", m, a, name)
    return None

problems = 0
out = {}
report = collections.defaultdict(list)
edges = collections.defaultdict(set); lateedges = collections.defaultdict(set)
for nm, sections in new.items():
    # order: who reads whom at import time among sections
    order = sections
    idx = {}
    for q, sec in enumerate(sections):
        for k in sec.pieces:
            for n in sec.s.pieces[k][0]: idx[home[sec.s.mod, n]] = q
    deps = {q: set() for q in range(len(sections))}
    def top_reads(sec, k):
        """names read when the statement runs at import"""
        names = set()
        node = sec.s.pieces[k][1]
        def visit(n, inside):
            if isinstance(n, (cst.FunctionDef, cst.Lambda)):
                if isinstance(n, cst.FunctionDef):
                    for d in n.decorators: visit(d, inside)
                    for p in [*n.params.params, *n.params.kwonly_params, *n.params.posonly_params]:
                        if p.default is not None: visit(p.default, inside)
                return
            if isinstance(n, cst.Annotation): return
            if isinstance(n, cst.Name): names.add(n.value)
            for c in n.children: visit(c, inside)
        for nd in aslist(node): visit(nd, False)
        return names
    for q, sec in enumerate(sections):
        for k in sec.pieces:
            for n in top_reads(sec, k):
                t = target_of(sec.s, n)
                if t and t[0] == "def" and t[1] == nm:
                    p = idx.get((t[1], t[2]))
                    if p is not None and p != q: deps[q].add(p)
    done, seq = set(), []
    while len(seq) < len(sections):
        ready = [q for q in range(len(sections)) if q not in done and deps[q] <= done]
        if not ready:
            report[nm].append(f"circle of sections {[sections[q].s.rel for q in range(len(sections)) if q not in done]}"); ready = [q for q in range(len(sections)) if q not in done]
        q = ready[0]; done.add(q); seq.append(q)
    sections = [sections[q] for q in seq]
    # names
    want = {}    # local name -> target
    texts = {}   # dedupe of equal statements
    drop = set()
    for sec in sections:
        for k in sec.pieces:
            for n in sec.s.pieces[k][0]:
                t = ("def", *home[sec.s.mod, n]); code = cst.Module(body=aslist(sec.s.pieces[k][1])).code.strip()
                if t[2] in texts and texts[t[2]] != code: report[nm].append(f"COLLISION {t[2]}: {sec.s.rel} (defined)")
                elif t[2] in texts: drop.add((id(sec), k))
                else: texts[t[2]] = code
                want[t[2]] = t
    imports = collections.defaultdict(dict)   # module -> {name: alias}
    plain = set(); tc_imports = collections.defaultdict(dict); tc_plain = set()
    body = []
    for sec in sections:
        s = sec.s
        ren = {}     # id(node) -> new text
        if s.globals is not None:
            mine = set(sec.pieces)
            for a in s.globals.assignments:
                refs = [acc.node for acc in a.references if s.owner.get(id(acc.node)) in mine]
                defnodes = []
                if isinstance(a, Assignment) and not isinstance(a, ImportAssignment):
                    nd = a.node
                    if isinstance(nd, (cst.FunctionDef, cst.ClassDef)): nd = nd.name
                    if s.owner.get(id(nd)) in mine or s.owner.get(id(a.node)) in mine: defnodes = [nd]
                if not refs and not defnodes: continue
                name = a.name
                if isinstance(a, BuiltinAssignment): continue
                t = target_of(s, name.split(".")[0] if isinstance(a, ImportAssignment) else name)
                full = None
                if t is None:
                    # import a.b.c without alias
                    for (local, fullname), (m_, a_, tc) in s.imports.items():
                        if fullname is not None and (fullname == name or local == name.split(".")[0]):
                            (tc_plain if tc else plain).add(fullname)
                    continue
                tc = next((v[2] for (l, f), v in s.imports.items() if l == name), False)
                if t[0] == "def":
                    _, m2, n2 = t
                    final = n2
                    alias = next((l for (l, f), v in s.imports.items() if l == name and v[1] != name and f is None), None)
                    if m2 != nm:
                        local = alias or n2
                        if want.get(local, t) != t: report[nm].append(f"COLLISION {local}: {s.rel} imports {m2}.{n2}, there is {want[local]}"); 
                        want[local] = t
                        final = local
                        (tc_imports if tc else imports)[m2][(n2, local)] = 1
                        edges[nm].add(m2) if not tc else None
                    if final != name:
                        for r in [*refs, *defnodes]: ren[id(r)] = final
                elif t[0] == "mod":
                    _, m2, oldmod, local = t
                    if m2 == nm:
                        # attributes become plain names
                        report[nm].append(f"MODULE {local} ({oldmod}) is now this file: {s.rel}")
                        sec.inline = getattr(sec, "inline", {}); sec.inline[local] = oldmod
                    else:
                        pk, _, leaf = m2.rpartition(".")
                        if want.get(local, t) != t: report[nm].append(f"COLLISION module {local} in {s.rel}")
                        want[local] = t
                        (tc_imports if tc else imports)[pk][(leaf, local)] = 1
                        edges[nm].add(m2)
                        for r in refs: pass
                else:
                    _, m2, a2, local = t
                    if want.get(local, t) != t: report[nm].append(f"COLLISION {local}: {s.rel} imports {m2}.{a2}, there is {want[local]}")
                    want[local] = t
                    if a2 is None: (tc_plain if tc else plain).add(m2 if m2 == local else f"{m2} as {local}")
                    else: (tc_imports if tc else imports)[m2][(a2, local)] = 1
        class T(cst.CSTTransformer):
            def leave_Name(self, o, u):
                return u.with_changes(value=ren[id(o)]) if id(o) in ren else u
            def leave_Attribute(self, o, u):
                inl = getattr(sec, "inline", {})
                if isinstance(o.value, cst.Name) and o.value.value in inl:
                    h = home.get((inl[o.value.value], o.attr.value))
                    if h is None: report[nm].append(f"no home for {o.value.value}.{o.attr.value}"); return u
                    return cst.Name(h[1])
                return u
            def leave_SimpleStatementLine(self, o, u):
                keep = []; extra = []
                for b, ob in zip(u.body, o.body):
                    if isinstance(ob, cst.ImportFrom) and ob.module is not None and dotted(ob.module).split(".")[0] == "solver_shard":
                        for a in ob.names:
                            local = a.asname.name.value if a.asname else a.name.value
                            r = resolve(dotted(ob.module), a.name.value)
                            if r[0] == "def":
                                if r[1] == nm:
                                    if local != r[2]: report[nm].append(f"late import with alias {local}")
                                    continue
                                extra.append((r[1], r[2], local)); lateedges[nm].add(r[1])
                            else:
                                pk, _, leaf = r[1].rpartition(".")
                                extra.append((pk, leaf, local)); lateedges[nm].add(r[1])
                    else: keep.append(b)
                if not extra and len(keep) == len(u.body): return u
                lines = collections.defaultdict(list)
                for m2, n2, local in extra: lines[m2].append(n2 if n2 == local else f"{n2} as {local}")
                sts = [cst.parse_statement(f"from {m2} import {', '.join(sorted(ns))}") for m2, ns in sorted(lines.items())]
                if keep: sts.append(u.with_changes(body=keep))
                if not sts: return cst.RemoveFromParent()
                sts[0] = sts[0].with_changes(leading_lines=u.leading_lines)
                return cst.FlattenSentinel(sts)
        nodes = []
        for k in sec.pieces:
            if (id(sec), k) in drop: continue
            for nd in aslist(s.pieces[k][1]):
                r = nd.visit(T())
                if isinstance(r, cst.FlattenSentinel): nodes += list(r)
                elif not isinstance(r, cst.RemovalSentinel): nodes.append(r)
        body.append((sec, nodes))
    # ------------------------------------------------ text
    secs = [b for b in body if b[1] or b[0].main]
    mains = [sec for sec, _ in body if sec.main]
    lines = []
    given_doc = C.DOCS.get(relof[nm])
    if given_doc: lines.append(f'"""{given_doc.strip()}"""\n')
    elif relof[nm] in files and src[modname(files[relof[nm]][0])].rawdoc: lines.append(src[modname(files[relof[nm]][0])].rawdoc + "\n")
    code_sections = []
    first_main = src[modname(files[relof[nm]][0])] if relof[nm] in files else None
    for sec, nodes in secs:
        head = ""
        if sec.main and sec.s is not first_main and sec.s.doc and nodes:
            text = "\n".join(("# " + l).rstrip() for l in sec.s.doc.strip().splitlines())
            head = text + "\n\n"
        code = cst.Module(body=nodes).code.strip("\n")
        if code: code_sections.append(head + code)
    if code_sections or imports or plain:
        lines.append("from __future__ import annotations\n")
        for p in sorted(plain): lines.append(f"import {p}")
        for m2 in sorted(imports):
            ns = ", ".join(n if n == l else f"{n} as {l}" for n, l in sorted(imports[m2]))
            lines.append(f"from {m2} import {ns}")
        tci = {m2: {k for k in ks if k not in imports.get(m2, {})} for m2, ks in tc_imports.items()}
        tci = {m2: ks for m2, ks in tci.items() if ks}
        tcp = tc_plain - plain
        if tci or tcp:
            if not any(l.startswith("from typing") and "TYPE_CHECKING" in l for l in lines): lines.append("from typing import TYPE_CHECKING")
            lines.append("\nif TYPE_CHECKING:")
            for p in sorted(tcp): lines.append(f"    import {p}")
            for m2 in sorted(tci):
                ns = ", ".join(n if n == l else f"{n} as {l}" for n, l in sorted(tci[m2]))
                lines.append(f"    from {m2} import {ns}")
    text = "\n".join(lines) + "\n\n\n" + "\n\n\n".join(code_sections) + "\n"
    out[relof[nm]] = text.strip("\n") + "\n" if text.strip() else ""

bad = 0
for nm in sorted(report):
    for r in sorted(set(report[nm])): print(relof[nm], "|", r); bad += r.startswith(("COLLISION", "circle", "no home"))
# circles
import itertools
def sccs(g):
    index, low, st, on, res, cnt = {}, {}, [], set(), [], itertools.count()
    sys.setrecursionlimit(10000)
    def go(v):
        index[v] = low[v] = next(cnt); st.append(v); on.add(v)
        for w in g.get(v, ()):
            if w not in index: go(w); low[v] = min(low[v], low[w])
            elif w in on: low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            c = []
            while True:
                w = st.pop(); on.discard(w); c.append(w)
                if w == v: break
            res.append(c)
    for v in list(g): 
        if v not in index: go(v)
    return [c for c in res if len(c) > 1]
g = {m: {e for e in edges[m] | lateedges[m] if e in relof} - {m} for m in relof}
g1 = {m: {e for e in edges[m] if e in relof} - {m} for m in relof}
print("circles without late imports:", [sorted(c) for c in sccs(g1)])
print("circles with late imports:", [sorted(c) for c in sccs(g)])
def folder(m):
    r = relof[m].split("/")
    return r[0] if len(r) > 1 else r[0]
fg = collections.defaultdict(set)
for m, es in g.items():
    for e in es:
        if folder(m) != folder(e) and relof[m] not in ("__init__.py", "__main__.py"): fg[folder(m)].add(folder(e))
for c in sccs(fg):
    print("folder circle", sorted(c))
    for m, es in g.items():
        for e in es:
            if folder(m) in c and folder(e) in c and folder(m) != folder(e): print("    ", relof[m], "->", relof[e], "(late)" if e not in g1[m] else "")
print(len(out), "files;", bad, "collisions")
if "--emit" in sys.argv:
    d = Path(sys.argv[sys.argv.index("--emit") + 1])
    for rel, text in out.items():
        (d / rel).parent.mkdir(parents=True, exist_ok=True); (d / rel).write_text(text)
if WRITE:
    import apply; apply.run(ROOT, PKG, have, out, target, home, src, resolve, OLD, NEWMOD)
