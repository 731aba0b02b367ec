"""A training loop of one's own: learning rate schedule, clipping, evaluation, weights at the end.

python examples/own_loop.py
torchrun --nproc-per-node=2 examples/own_loop.py
"""

from functools import partial

import torch

import pdcompile


class Net(torch.nn.Module):
    """A skip connection, a keyword argument and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.head = torch.nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = x
        for layer in self.inner:
            hidden = torch.relu(layer(hidden * scale))
        return {"y": self.head(hidden + x), "hidden": hidden}


def loss_fn(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output["y"], target)


torch.manual_seed(0)  # every rank makes the same model and the same batches
model = Net()
batch = {"x": torch.randn(16, 32), "scale": torch.full((16, 1), 0.9)}
target = batch["x"].mean(1, keepdim=True)

pipe = pdcompile.compile(
    model,
    batch,
    example_target=target,
    loss_fn=loss_fn,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    microbatches=4,
)
decay = torch.optim.lr_scheduler.StepLR(pipe.optimizer, step_size=5, gamma=0.5)
for epoch in range(10):
    pipe.zero_grad()
    result = pipe.forward_backward(**batch, target=target)
    norm = pipe.clip_grad_norm_(1.0)
    pipe.optimizer.step()
    decay.step()
    print(f"epoch {epoch}: loss {float(result.loss):.4f}, gradient norm {float(norm):.3f}")

print(f"evaluated: {float(pipe.eval_step(**batch, target=target).loss):.4f}")
output = pipe.predict(**batch)  # None but on the last stage's rank
weights = pipe.full_state_dict()  # of the whole model on rank 0, {} on the others
pipe.close()
if weights:
    plain = Net()
    plain.load_state_dict(weights)
    with torch.no_grad():
        print(f"plain PyTorch: {float(loss_fn(plain(**batch), target)):.4f}")
