"""python examples/train.py   or   torchrun --nproc-per-node=2 examples/train.py"""

from functools import partial

import torch

import pdcompile

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
data = torch.randn(20, 32, 64)

pipe = pdcompile.compile(
    model,
    loss_fn=torch.nn.functional.mse_loss,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    microbatches=4,
)
for i, batch in enumerate(data):
    result = pipe.step(batch, target=batch.flip(1))
    if i % 5 == 0:
        print(i, float(result.loss))  # the same on every rank
pipe.close()
