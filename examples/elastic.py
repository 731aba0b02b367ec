"""A training that goes on after a rank was killed: torchrun starts all again, and they resume.

    torchrun --nproc-per-node=2 --max-restarts=3 examples/elastic.py checkpoints

Rank 1 kills itself at minibatch 15 of the first attempt. The second one takes the checkpoint of
minibatch 10 and ends with the weights of a training that was never interrupted.
"""

import os
import signal
import sys
from functools import partial

import torch

import pdcompile

folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
rank = int(os.environ.get("RANK", "0"))

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
data = torch.randn(30, 32, 64)

pipe = pdcompile.compile(
    model,
    loss_fn=torch.nn.functional.mse_loss,
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    microbatches=4,
    resume=folder,
)
for t, batch in enumerate(data):
    if t >= pipe.position.minibatches:  # those before are in the checkpoint
        if attempt == 0 and rank == 1 and t == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        result = pipe.step(batch, target=batch.flip(1))
        if t % 10 == 9:
            pipe.save(folder, keep=2)
            if rank == 0:
                print(f"attempt {attempt}, minibatch {t}: loss {float(result.loss):.6f}")
pipe.close()
