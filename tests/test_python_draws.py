"""Random numbers of numpy and Python: arrays are one op each, on streams of their own, numbers are
drawn in opaque modules; they are never constants."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pdcompile
from pdcompile.eager.randomness import DrawScope, preserved_rng
from pdcompile.errors import SourceError, TraceError
from pdcompile.ir import python_draws
from pdcompile.ir.graph import Capture
from pdcompile.ir.python_draws import PythonDraw
from tests.helpers.captures import captured, faithful, make, rows
from tests.helpers.launch import processes
from tests.helpers.loops import same

RAND = np.random.rand  # by this name nobody sees who draws
pytestmark = [
    pytest.mark.filterwarnings("ignore:captured as opaque"),
    pytest.mark.usefixtures("captured_anew"),
]


def masked_spans(shape: tuple[int, int], width: int, lengths: Any = None) -> np.ndarray:
    """Like transformers' _compute_mask_indices: as many draws as there are samples."""
    mask = np.zeros(shape, dtype=bool)
    for i, length in enumerate([shape[1]] * shape[0] if lengths is None else lengths.tolist()):
        start = np.random.randint(0, max(length - width, 0) + 1)
        mask[i, start : start + width] = True
    return mask


def with_torch(count: int) -> np.ndarray:
    return np.random.rand(count) * torch.rand(()).item()


def fresh_rows(x: Tensor) -> Tensor:
    """Takes a tensor with gradients: each call of np.random is an op of its own."""
    return x * torch.from_numpy(np.random.rand(*x.shape)).float()


class Skips(nn.Module):
    """Decides by a number, which makes it opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if random.random() < 0.5 else x


class Spans(nn.Module):
    """Masks by a function, by one call and by lengths; drops layers; in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.skips, self.head = nn.Linear(8, 8), Skips(), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.drop(self.lin(x))
        if self.training:
            h[torch.tensor(masked_spans((len(x), 8), 3), device=h.device, dtype=torch.bool)] = 0
            h = h + torch.from_numpy(np.random.normal(size=tuple(h.shape))).float()
            h[torch.as_tensor(masked_spans((len(x), 8), 2, lengths=lengths))] = 1
        h = self.skips(torch.relu(h))
        return self.head(h[:, np.random.permutation(8)])  # type: ignore[no-any-return]


def spans() -> Spans:
    torch.manual_seed(0)
    return Spans()


def example(seed: int = 0) -> tuple[Tensor, Tensor]:
    return rows(6, seed=seed), torch.arange(6) % 5 + 4


@cache
def captured_spans() -> tuple[Spans, Capture]:
    """The model and its capture, which is as eager at several sizes."""
    model = spans()
    return model, faithful(model, *example(), sizes=(1, 3, 6))


def test_the_graph_draws_what_eager_draws() -> None:
    _, found = captured_spans()
    draws = [op for op in found.train.ops if op.target.endswith("PythonDraw.apply")]
    names = [op.args[0] for op in draws]
    own = f"{__name__}.masked_spans"
    assert names == [own, "numpy.random.normal", own, "numpy.random.permutation"]
    assert [op.draw for op in draws] == [*range(4)]
    assert [op.module_path for op in found.train.ops if op.opaque] == ["skips"]


def test_stages_train_as_the_reference_and_leave_the_callers_generators_alone() -> None:
    model, other = spans(), spans()
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 3, "seed": 7,
        "loss_fn": lambda output, target: (output - target).square().mean(),
    }  # fmt: skip
    reference = pdcompile.reference(other, **options)
    losses, states = [], []
    with pdcompile.compile(
        model, cluster=pdcompile.Cluster.local(3), stages=3, costs="estimated",
        recompute=(False, True, False), verify="full", **options,
    ) as pipe:  # fmt: skip
        for step in range(3):
            call = partial(reference.step, *example(step), target=rows(6, seed=9))
            mine, theirs = pipe.step(*call.args, **call.keywords), call()
            losses.append(float(mine.loss))
            states.append(python_draws.states())
            assert losses[-1] == float(theirs.loss)
        assert torch.equal(pipe.predict(*example()), reference.predict(*example()))
        same(pipe.to_model(), other)
    assert len(set(losses)) == 3
    assert states[0] == states[1] == python_draws.states()


def test_the_graph_as_a_module_draws_from_the_callers_generators() -> None:
    model, found_once = captured_spans()
    module = found_once.train.to_module()
    found = []
    for each in (model, module):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        found.append(each(*example()))
    assert torch.equal(*found)


def test_draws_are_named_by_function_and_module() -> None:
    def drawn(seed: int, microbatch: int) -> tuple[list[tuple[str, int]], float]:
        model, call = spans(), example()
        with preserved_rng(), DrawScope(model, seed, 0, microbatch) as scope:
            total = float(model(*call).detach().sum())
        return scope.draws, total

    draws, total = drawn(0, 0)
    assert draws == [("drop", 0), *(("", i) for i in range(3)), ("skips", 0), ("", 3)]
    np.random.seed(1)
    random.seed(1)
    assert drawn(0, 0) == (draws, total)
    assert len({total, drawn(1, 0)[1], drawn(0, 1)[1]}) == 3


def test_a_checkpointed_region_draws_the_same_again() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def region(self, x: Tensor) -> Tensor:
            return self.lin(x) * torch.from_numpy(np.random.rand(8)).float()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(  # type: ignore[no-any-return]
                checkpoint(self.region, self.lin(x), use_reentrant=False)
            )

    torch.manual_seed(0)
    faithful(Region())


def test_a_submodule_that_computes_with_drawn_numbers_is_opaque() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(np.random.rand()) + random.uniform(0, 1)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.lin(self.scaled(self.lin(x)))  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match="captured as opaque: 'scaled'.*not torch's"):
        found = faithful(make(forward, scaled=Scaled()))
    assert [op.kind for op in found.train.ops] == ["module", "opaque", "module"]


def _number(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * np.random.rand()  # type: ignore[no-any-return]


def _arithmetic(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * torch.tensor(np.random.rand(8) > 0.5)  # type: ignore[no-any-return]


def _shuffled(self: Any, x: Tensor) -> Tensor:
    order = list(range(8))
    random.shuffle(order)
    return self.lin(x)[:, order]  # type: ignore[no-any-return]


def _both_generators(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * torch.tensor(with_torch(8))  # type: ignore[no-any-return]


def _seeds(self: Any, x: Tensor) -> Tensor:
    np.random.seed(0)
    return self.lin(x)  # type: ignore[no-any-return]


def _by_itself(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) if RAND() < 0.5 else x


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("forward", "words"),
    {
        _number: "not torch's (rand)",
        _arithmetic: "not torch's (rand)",
        _shuffled: "not torch's (shuffle)",
        _both_generators: "and from torch's generator",
        _seeds: "draws from or seeds numpy.random",
        _by_itself: "draws from or seeds numpy.random",
    }.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_needs_the_numbers_is_refused_by_name(forward: Callable[..., Any], words: str) -> None:
    before = python_draws.states()
    with pytest.raises(TraceError) as caught:
        captured(make(forward))
    assert words in caught.value.message
    assert caught.value.remedy
    assert "test_python_draws.py" in (caught.value.where or "")
    assert python_draws.states() == before


def test_a_tensor_with_gradients_is_no_argument_of_an_op_that_draws() -> None:
    found = faithful(make(lambda self, x: fresh_rows(self.lin(x))))
    (draw,) = [op for op in found.train.ops if op.draw is not None]
    assert draw.args[0] == "numpy.random.rand"


@pytest.mark.parametrize("name", ["os.system", "numpy.load", "random.seed", "not.there", "rand"])
def test_a_graph_calls_no_function_but_those_that_draw(name: str) -> None:
    with pytest.raises(SourceError, match="no function that draws"):
        PythonDraw.apply(name, (), {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "draw",
    [random.random, partial(random.gauss, 0.0, 1.0), partial(random.getrandbits, 3), RAND],
    ids=["random", "gauss", "bits", "rand"],
)
def test_every_draw_changes_the_marks(draw: Callable[[], Any]) -> None:
    with preserved_rng():
        marks = [python_draws.marks()]
        for _ in range(3):  # the second of two normal numbers leaves the words as they are
            draw()
            assert python_draws.marks() == python_draws.marks() != marks[-1]
            marks.append(python_draws.marks())
        assert len(set(marks)) == len(marks)


def test_functions_of_the_generators_are_back_in_their_places() -> None:
    before = dict(vars(np.random)), dict(vars(random))
    captured(make(lambda self, x: fresh_rows(self.lin(x))))
    with DrawScope(nn.Linear(1, 1), 0, 0, 0):
        assert np.random.rand is not before[0]["rand"]
    assert (dict(vars(np.random)), dict(vars(random))) == before
    assert copy.copy(masked_spans) is masked_spans


@pytest.mark.slow
def test_wav2vec2_masks_its_features_in_training() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, conv_dim=[16, 16, 16], conv_kernel=[8, 4, 4],
        conv_stride=[4, 4, 4], num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        mask_time_prob=0.3, mask_time_length=2, mask_feature_prob=0.2, mask_feature_length=3,
        layerdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Wav2Vec2ForCTC(config)
    other = copy.deepcopy(model)
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 2}
    reference = pdcompile.reference(other, **options)
    with pdcompile.compile(
        model, cluster=pdcompile.Cluster.local(3), costs="estimated", **options
    ) as pipe:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            batch = {
                "input_values": torch.randn(4, 1200, generator=generator),
                "attention_mask": (torch.arange(1200) < torch.tensor([[1200], [900]] * 2)).long(),
                "labels": torch.randint(1, 20, (4, 4), generator=generator),
            }
            assert float(pipe.step(**batch).loss) == float(reference.step(**batch).loss)
        same(pipe.to_model(), other)


ON_RANKS = """
    import copy, os
    from functools import partial
    import torch
    import pdcompile
    from tests.helpers.captures import rows
    from tests.test_python_draws import example, spans

    common = dict(optimizer=partial(torch.optim.SGD, lr=0.1), microbatches=2, costs="estimated",
                  loss_fn=torch.nn.functional.mse_loss)
    model = spans()
    twin = copy.deepcopy(model)
    pipe = pdcompile.compile(model, stages=2, schedule="2bw", **common)
    losses = [float(pipe.step(*example(t), target=rows(6, seed=9 + t)).loss) for t in range(4)]
    state = pipe.full_state_dict()
    pipe.close()
    if os.environ["RANK"] == "0":
        eager = pdcompile.reference(twin, schedule="2bw", **common)
        for t, loss in enumerate(losses):
            assert float(eager.step(*example(t), target=rows(6, seed=9 + t)).loss) == loss, t
        theirs = eager.full_state_dict()
        assert all(torch.equal(state[name], value) for name, value in theirs.items())
        print("equal", flush=True)
"""


@pytest.mark.slow
def test_ranks_draw_what_the_reference_draws(tmp_path: Path) -> None:
    run = processes(ON_RANKS, 2, tmp_path)
    assert run.code == 0, run
    assert "equal" in run.output, run


def test_a_step_without_such_draws_does_not_read_their_generators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take longer than many an op."""
    read: list[int] = []
    plain = python_draws.states
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": None}
    draws = make(lambda self, x: fresh_rows(self.lin(x)))
    for model, times in ((nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 0), (draws, 1)):
        pipe = pdcompile.compile(model, microbatches=2, costs="estimated", verify="off", **options)
        pipe.forward_backward(rows(6), target=rows(6))
        with monkeypatch.context() as patched:
            patched.setattr(python_draws, "states", lambda: read.append(1) or plain())
            before = plain()
            pipe.forward_backward(rows(6), target=rows(6))
            assert plain() == before
        assert len(read) == times
        pipe.close()
