import sys; sys.path[:0]=['/work/wt/apply','/work/wt/apply/tests','/work/wt/apply/tests/e2e']
from test_processes import random_plan
for s in range(6):
    p=random_plan(s)
    print(s,{t.name:(t.layout,t.state, p.tensors[p.gradients[t.name]].layout if t.name in p.gradients else None) for t in p.tensors if t.role in("parameter","buffer")})
