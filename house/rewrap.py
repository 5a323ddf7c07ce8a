"""Wrap docstring and comment lines that became too long: after formatting."""
import re, sys, io, tokenize, textwrap
from pathlib import Path
W = 140
def prose(text):
    """Line numbers (0-based) inside docstrings, and full comment lines."""
    doc, com = set(), set()
    prev = None
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        if t.type == tokenize.STRING and (prev is None or prev in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)) and '"""' in t.string:
            doc.update(range(t.start[0] - 1, t.end[0]))
        if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip(): com.add(t.start[0] - 1)
        if t.type not in (tokenize.NL, tokenize.COMMENT): prev = t.type
    return doc, com
def rewrap(text):
    while True:
        doc, com = prose(text); lines = text.splitlines()
        for i, l in enumerate(lines):
            if len(l) <= W or not (i in doc or i in com): continue
            where = doc if i in doc else com
            m = re.match(r"(\s*(?:# ?)?)" if i in com else r"(\s*)", l); pre = m.group(1)
            b = i
            def same(k):
                if k not in where or k >= len(lines): return False
                x = lines[k]
                if not x.startswith(pre): return False
                r = x[len(pre):]
                return bool(r.strip()) and not r[0].isspace() and '"""' not in x and not re.match(r"(\d+\.|-|\*) ", r)
            while same(b + 1): b += 1
            words = " ".join(x[len(pre):].strip() for x in lines[i:b + 1])
            new = textwrap.wrap(words, W, initial_indent=pre, subsequent_indent=pre, break_long_words=False, break_on_hyphens=False)
            if new == lines[i:b + 1]: continue
            lines[i:b + 1] = new
            text = "\n".join(lines) + "\n"
            break
        else: return text
for p in Path(sys.argv[1]).rglob("*.py"):
    t = p.read_text(); n = rewrap(t)
    if n != t: p.write_text(n); print("wrapped", p)
