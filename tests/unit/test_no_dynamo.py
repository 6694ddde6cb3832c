"""The dense optimizers update as torch's, without torch._dynamo until torch.compile needs it."""

import sys

from launch import run

PROGRAM = """
import sys

import torch

from hetmpi.no_dynamo import update_of

KINDS = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam
pairs = []
for kind in KINDS:
    update, models = update_of(kind), [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (kind(model.parameters(), lr=0.1, weight_decay=0.01) for model in models)
    pairs.append((models, ours, theirs))
    for _ in range(3):
        ours.zero_grad()
        models[0](torch.ones(4, 3)).square().sum().backward()
        with torch.no_grad():
            update(ours)
    ours.load_state_dict(ours.state_dict())
assert "torch._dynamo" not in sys.modules
for models, ours, theirs in pairs:
    for _ in range(3):
        theirs.zero_grad()
        models[1](torch.ones(4, 3)).square().sum().backward()
        theirs.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
assert "torch._dynamo" in sys.modules
models, ours, _ = pairs[0]
model = torch.compile(models[0], backend="eager")
ours.zero_grad()
model(torch.ones(4, 3)).sum().backward()
ours.step()
assert ours.state_dict()["param_groups"]
print("well")
"""


def test_the_dense_optimizers_update_as_those_of_torch_and_without_its_compiler():
    outcome = run([sys.executable, "-c", PROGRAM])
    assert outcome.text.endswith("well\n"), outcome.text
