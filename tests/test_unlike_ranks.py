"""Ranks whose programs differ are refused before anything is built; what a rank may have of its own
is not.  Many cases share one launch: who is refused can call again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launch import processes

SCRIPT = """
    import logging, os, pathlib, sys
    from dataclasses import dataclass
    from functools import partial
    import torch
    from torch import nn
    import pdcompile
    from pdcompile.problem.constraints import Pin

    RANK = int(os.environ["RANK"])
    F, SGD, AdamW = nn.functional, torch.optim.SGD, torch.optim.AdamW
    x, y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.ones(8, 16)

    class Block(nn.Module):
        def __init__(self, width=16, act=nn.Tanh, p=0.0, **own):
            super().__init__()
            self.first, self.act, self.second = nn.Linear(16, width), act(), nn.Linear(width, 16)
            self.drop, self.scale, self.rank, self.log = nn.Dropout(p), 1.0, None, None
            vars(self).update(own)

        def forward(self, x):
            if self.rank == 0 and self.log is not None:
                self.log("hello")
            return self.drop(self.second(self.act(self.first(x)))) * self.scale

    class Other(Block):
        def forward(self, x):
            return super().forward(x) + 1

    @dataclass
    class Config:
        kind: str | None = None
        width: int = 1

    class Holder:
        def __init__(self, config):
            self.config = config

    class Lazy(Block):  # as Hugging Face's classifiers
        def forward(self, x):
            if self.config.kind is None:
                self.config.kind = "regression"
            self.again.config.kind
            return super().forward(x) * self.config.width

    def configured(model):
        for block in model:
            block.config = model[0].config if block is not model[0] else Config()
            vars(block)["again"] = Holder(block.config)
        return model

    def made(*, block=Block, layers=3, seed=0, wrap=lambda model: model, **own):
        torch.manual_seed(seed)
        return wrap(nn.Sequential(*(block(**own) for _ in range(layers))))

    def frozen(model):
        model[1].first.weight.requires_grad_(False)
        return model

    def tied(model):
        model[1].first.weight = model[0].first.weight
        return model

    def evaluated(model):
        model[1].drop.eval()
        return model

    def hooked(model):
        model.rank, model.path = RANK, f"/tmp/of-{RANK}"
        if RANK == 0:
            model[0].counts = Counter()
            model[1].register_forward_hook(lambda *_: None)
        return model

    class Counter(nn.Module):
        pass

    def groups(lr):
        return lambda ps: SGD([{"params": [p for n, p in ps.named if "first" in n], "lr": lr},
                               {"params": [p for n, p in ps.named if "first" not in n]}], 0.1)

    def weighted(weight):
        return lambda out, target: F.mse_loss(out, target) * weight

    def count(args, kwargs, target):
        return len(args[0])

    def count_more(args, kwargs, target):
        return len(args[0]) + 1

    # name: what rank 0 is given, and what rank 1; of the model (m), of compile (c), of the call (x)
    UNLIKE = {
        "layers": ({}, {"m": {"layers": 4}}),
        "width": ({}, {"m": {"width": 24}}),
        "activation": ({}, {"m": {"act": nn.ReLU}}),
        "approximate": ({"m": {"act": nn.GELU}}, {"m": {"act": partial(nn.GELU, "tanh")}}),
        "dropout": ({}, {"m": {"p": 0.1}}),
        "code": ({}, {"m": {"block": Other}}),
        "frozen": ({}, {"m": {"wrap": frozen}}),
        "tied": ({}, {"m": {"wrap": tied}}),
        "evaluated": ({}, {"m": {"wrap": evaluated}}),
        "dtype": ({}, {"m": {"wrap": lambda model: model.double()}}),
        "scale": ({}, {"m": {"scale": 2.0}}),
        "loss": ({}, {"c": {"loss_fn": F.l1_loss}}),
        "lambda": ({"c": {"loss_fn": lambda o, t: F.mse_loss(o, t)}},
                   {"c": {"loss_fn": lambda o, t: F.mse_loss(o, t) * 2}}),
        "partial": ({"c": {"loss_fn": partial(F.huber_loss, delta=1.0)}},
                    {"c": {"loss_fn": partial(F.huber_loss, delta=2.0)}}),
        "module": ({"c": {"loss_fn": nn.HuberLoss()}}, {"c": {"loss_fn": nn.HuberLoss(delta=2.0)}}),
        "lr": ({}, {"c": {"optimizer": lambda ps: SGD(ps, lr=0.2)}}),
        "momentum": ({}, {"c": {"optimizer": partial(SGD, lr=0.1, momentum=0.9)}}),
        "class": ({}, {"c": {"optimizer": partial(AdamW, lr=0.1)}}),
        "betas": ({"c": {"optimizer": AdamW}},
                  {"c": {"optimizer": partial(AdamW, betas=(0.0, 0.9))}}),
        "decay": ({"c": {"optimizer": AdamW}},
                  {"c": {"optimizer": partial(AdamW, weight_decay=0)}}),
        "groups": ({"c": {"optimizer": groups(0.2)}}, {"c": {"optimizer": groups(0.3)}}),
        "no optimizer": ({}, {"c": {"optimizer": None}}),
        "microbatches": ({}, {"c": {"microbatches": 2}}),
        "schedule": ({}, {"c": {"schedule": "gpipe"}}),
        "autocast": ({}, {"c": {"autocast": "bfloat16"}}),
        "clip": ({}, {"c": {"max_grad_norm": 1.0}}),
        "seed": ({}, {"c": {"seed": 1}}),
        "reduction": ({}, {"c": {"loss_reduction": "sum"}}),
        "items": ({"c": {"loss_reduction": count}}, {"c": {"loss_reduction": count_more}}),
        "constraints": ({}, {"c": {"constraints": [Pin("0", 0)]}}),
        "batch": ({}, {"x": x[:4]}),
        "example": ({}, {"x": x.double()}),
    }
    # What each rank may have of its own.
    ALIKE = {
        "nothing": [{}, {}],
        "seed of weights": [{"m": {"seed": RANK}}] * 2,
        "hooks, rank, path": [{"m": {"wrap": hooked, "rank": RANK, "device": f"cuda:{RANK}",
                                     "path": pathlib.Path(f"/tmp/{RANK}")}}] * 2,
        "logger": [{"m": {"log": print, "rank": 0}}, {"m": {"log": None, "rank": 1}}],
        "main rank": [{"m": {"rank": RANK == 0, "log": lambda text: None}}] * 2,
        "a config that forward writes": [{"m": {"block": Lazy, "wrap": configured}}] * 2,
        "closures": [{"c": {"loss_fn": weighted(torch.tensor(1.0, device="cpu"))}}] * 2,
        "options": [{"c": {"progress": False, "memory": "8 GB", "time_limit": 5}},
                    {"c": {"costs": "measured", "verify": "off", "keep_model": True}}],
    }
    cases, default = {"unlike": UNLIKE, "alike": ALIKE}[sys.argv[1]], {
        "loss_fn": F.mse_loss, "optimizer": lambda ps: SGD(ps, lr=0.1), "microbatches": 4,
        "costs": "estimated", "refine": False, "progress_timeout": 60,
    }
    for name, ranks in cases.items():
        mine = ranks[RANK]
        pipe = pdcompile.compile(made(**mine.get("m", {})), **{**default, **mine.get("c", {})})
        example = mine.get("x", x)
        try:
            loss = float(pipe.step(example, target=y[:len(example)]).loss)
            pipe.close()
            print(f"<{name}> trained {loss:.6f}", flush=True)
        except pdcompile.PdcompileError as error:
            print(f"<{name}> {error.code} {error.message}", flush=True)
"""


def of_each(output: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, said in re.findall(r"^<(.+?)> (.*)$", output, re.MULTILINE):
        found.setdefault(name, []).append(said)
    return found


EXPECTED = {
    "layers": "program than rank 0: module 3 is not there on rank 0, Block on rank 1",
    "width": "first is Linear(in_features=16, out_features=16) on rank 0, Linear(in_features=16, ",
    "activation": "module 0.act is Tanh on rank 0, ReLU(inplace=False) on rank 1",
    "approximate": "module 0.act is GELU(approximate='none') on rank 0, GELU(approximate='tanh')",
    "dropout": "module 0.drop is Dropout(p=0.0, inplace=False) on rank 0, Dropout(p=0.1,",
    "code": "module 0 is Block on rank 0, Other on rank 1",
    "frozen": "tensor 1.first.weight is float32 (16, 16), trained on rank 0, float32 (16, 16) on",
    "tied": "tensor 0.first.weight is float32 (16, 16), trained on rank 0, float32 (16, 16), trai",
    "evaluated": "module 1.drop is Dropout(p=0.0, inplace=False) on rank 0, Dropout(p=0.0, inplac",
    "dtype": "tensor 0.first.weight is float32 (16, 16), trained on rank 0, float64 (16, 16), tra",
    "scale": "0.scale is 1.0 on rank 0, 2.0 on rank 1",
    "loss": "the loss function is torch.nn.functional.mse_loss on rank 0, torch.nn.functional.l1",
    "lambda": "the code of the loss function",
    "partial": "the loss function is partial(torch.nn.functional.huber_loss, delta=1.0) on rank 0",
    "module": "HuberLoss(reduction='mean', delta=1.0) on rank 0, HuberLoss(reduction='mean', del",
    "lr": "lr of parameter group 0 is 0.1 on rank 0, 0.2 on rank 1",
    "momentum": "momentum of parameter group 0 is 0 on rank 0, 0.9 on rank 1",
    "class": "the class of the optimizer is torch.optim.sgd.SGD on rank 0, torch.optim.adamw.AdamW",
    "betas": "betas of parameter group 0 is (0.9, 0.999) on rank 0, (0.0, 0.9) on rank 1",
    "decay": "weight_decay of parameter group 0 is 0.01 on rank 0, 0 on rank 1",
    "groups": "lr of parameter group 0 is 0.2 on rank 0, 0.3 on rank 1",
    "no optimizer": "the optimizer is given on rank 0, None on rank 1",
    "microbatches": "option microbatches is 4 on rank 0, 2 on rank 1",
    "schedule": "option schedule is '1f1b' on rank 0, 'gpipe' on rank 1",
    "autocast": "option autocast is None on rank 0, bfloat16 on rank 1",
    "clip": "option max_grad_norm is None on rank 0, 1.0 on rank 1",
    "seed": "option seed is 0 on rank 0, 1 on rank 1",
    "reduction": "option loss_reduction is 'mean' on rank 0, 'sum' on rank 1",
    "items": "option loss_reduction is __main__.count on rank 0, __main__.count_more on rank 1",
    "constraints": "option constraints is",
    "batch": "of the first minibatch is float32 (8, 16) on rank 0, float32 (4, 16) on rank 1",
    "example": "of the first minibatch is float32 (8, 16) on rank 0, float64 (8, 16) on rank 1",
}


def test_unlike_ranks_are_refused_with_what_differs(tmp_path: Path) -> None:
    run = processes(SCRIPT, 2, tmp_path, "unlike")
    found = of_each(run.output)
    assert found.keys() == EXPECTED.keys(), run
    for name, said in EXPECTED.items():
        assert len(found[name]) == 2, (name, found[name])
        assert len({*found[name]}) == 1, (name, found[name])
        begin = "PDC-LAUNCH rank 1 runs another program than rank 0: "
        assert found[name][0].startswith(begin), (name, found[name])
        assert said in found[name][0], (name, found[name])


@pytest.mark.slow
def test_what_a_rank_may_have_of_its_own_is_not_refused(tmp_path: Path) -> None:
    run = processes(SCRIPT, 2, tmp_path, "alike")
    found = of_each(run.output)
    assert len(found) == 8, run
    assert {*found["nothing"]} == {said for texts in found.values() for said in texts}, run
    for said in (
        "0.log is builtins.print on rank 0, None on rank 1",
        "0.rank is True on rank 0, F",
    ):
        assert f"runs with rank 0's: {said}" in run.output, run
    assert "Config(" not in run.output, run


WAITS = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    import pdcompile

    rank = int(os.environ["RANK"])
    class Meets(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        def forward(self, x):
            if sys.argv[1] == "slow":
                end = time.monotonic() + 5
                while time.monotonic() < end:
                    sum(range(1000))
                sys.argv[1] = "done"
            return self.second(self.first(x))
    if sys.argv[1] == "absent" and rank == 1:
        time.sleep(6)
        sys.exit()
    try:
        pipe = pdcompile.compile(Meets(), optimizer=None, loss_fn=torch.nn.functional.mse_loss,
                                 progress_timeout=3, costs="estimated", verify="off")
        x = torch.ones(4, 4)
        print(f"<{rank}> trained {float(pipe.step(x, target=x).loss) > 0}", flush=True)
    except pdcompile.PdcompileError as error:
        print(f"<{rank}> {error.code} {error.message}", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_computes_is_only_slow_and_one_that_is_not_there_is_named(
    tmp_path: Path,
) -> None:
    found = of_each(processes(WAITS, 2, tmp_path, "slow").output)
    assert found == {"0": ["trained True"], "1": ["trained True"]}
    (said,) = of_each(processes(WAITS, 2, tmp_path, "absent").output)["0"]
    assert said == (
        "PDC-LAUNCH rank 0 waits for rank 1 in start-up, and no rank has got further for 3 s"
    )
