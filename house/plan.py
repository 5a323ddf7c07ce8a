"""Read the moves of layout.md: {new: [old, ...]}."""
import re,sys,json
from pathlib import Path
moves={}
for line in Path(sys.argv[2]).read_text().splitlines():
    m=re.match(r'\| `([^`]+\.py)` \| [\d,]+ \| (.*) \|$',line)
    if m: moves[m[1]]=re.findall(r'`([^`]+)`',m[2])
