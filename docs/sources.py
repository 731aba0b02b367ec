"""`make docs`: write docs/sources.md, with a stage as `dump` writes it."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import pdcompile

PAGE = """\
# Stages as source

`pipe.dump(folder)` and `pdcompile dump` write what runs: one Python file a stage, `pipeline.py`,
which runs all of them in one process, and the plan. Each file needs torch and nothing of pdcompile
(what else it needs is listed under `# needs:`). Source that was edited since it was written, or
that `dump` did not write, is never written over (`digests.json` in the folder tells).

This model, cut into two stages:

```python
{model}```

becomes these two files. `make docs` wrote this page by dumping them.

`stage_0.py`:

```python
{first}```

`stage_1.py`:

```python
{second}```

- Blocks that do the same are one class; numbers in which they differ are its arguments. Names of
  modules, parameters and variables are the model's own, so that the stages' `state_dict()`s
  together are the model's.
- What the model leaves without a name stays inside an expression. The order of evaluation is the
  model's: outputs and gradients are equal to the last bit.
- Where a cut goes through a block, its ops stand in the stage's own `forward`, under a comment that
  names the module and the line.
- Where a function draws random numbers, a line `draw(...)` comes first. By itself it does nothing;
  pdcompile seeds the generator there, so that dropout masks do not depend on the cut.

## Edit and run

    python folder/pipeline.py             # forward and backward on made-up inputs

Change a file, say `p=0.1` into `p=0.2`, and load the folder again:

    pipe = pdcompile.compile(model, ..., sources="folder", allow_edited=True)

or `pdcompile run TARGET --sources folder --allow-edited`. Without `allow_edited` a folder must say
what pdcompile would have written; `pdcompile verify TARGET --sources folder --allow-edited` tells
where an edited one differs from the model. Keep the class names `Stage0`, `Stage1`, …, what
`forward` takes and returns, and the names of parameters.

A module that decides by the values of tensors is not written out: `OpaqueModule` stands in its
place, and pdcompile puts the model's own module there. `python pipeline.py` then ends with a line
that names it; `pipeline.main(model)` runs.
"""


# The model.
class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).relu()
        return x + self.drop(self.down(y))


class Tagger(nn.Module):
    def __init__(self, words: int = 100, width: int = 16, tags: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for hidden in (32, 64, 64, 32))
        self.head = nn.Linear(width, tags)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


# The page.
def page() -> str:
    """The text of docs/sources.md."""
    torch.manual_seed(0)
    with (
        pdcompile.compile(
            Tagger(),
            loss_fn=nn.functional.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            microbatches=2,
            stages=2,
            costs="estimated",
        ) as pipe,
        tempfile.TemporaryDirectory() as folder,
    ):
        pipe.prepare(torch.randint(100, (4, 8)), target=torch.randint(5, (4,)))
        pipe.dump(folder)
        first, second = (Path(folder, f"stage_{k}.py").read_text() for k in range(2))
    source = Path(__file__).read_text()
    model = source.partition("# The model.\n")[2].partition("\n\n# The page.")[0]
    return PAGE.format(model=model, first=first, second=second)


def main() -> None:
    path = Path(__file__).with_name("sources.md")
    path.write_text(page())
    print(f"written: {path}")


if __name__ == "__main__":
    main()
